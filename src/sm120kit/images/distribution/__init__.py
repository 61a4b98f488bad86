"""Registries through their HTTP API, without a container daemon."""

from sm120kit.images.distribution._registry_client import RegistryClient, RemoteArtifact, RemoteImage

__all__ = ["RegistryClient", "RemoteArtifact", "RemoteImage"]
