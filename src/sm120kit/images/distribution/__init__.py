"""Registries through their HTTP API, without a container daemon."""

from sm120kit.images.distribution._registry_client import RegistryClient, RemoteImage

__all__ = ["RegistryClient", "RemoteImage"]
