"""The request of an asynchronous save, and a queue of such requests, under Megatron-Core's name."""

from tilestone.megatron._calls.async_requests import AsyncCallsQueue, AsyncRequest

__all__ = ["AsyncCallsQueue", "AsyncRequest"]
