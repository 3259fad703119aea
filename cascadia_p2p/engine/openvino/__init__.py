"""Matrix products by OpenVINO: on a GPU, on other devices that it knows, on the CPU as the reference."""

from cascadia_p2p.engine.openvino.environment import set_plugin_environment

# Before any module here imports openvino: a plugin may copy the environment while it is loaded.
set_plugin_environment()
