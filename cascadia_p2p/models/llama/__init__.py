"""The Llama family: dense decoders with rotary attention (Llama, Mistral, Qwen2, Qwen3, SmolLM2)."""
