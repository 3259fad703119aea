"""Stages that wait as long as others compute, to measure all around them. Only `bench` makes them."""
