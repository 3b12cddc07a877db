"""The control loop and everything that changes state: effects, admission, requests."""
