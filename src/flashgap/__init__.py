"""flashgap: measure, explain and close the speed gap between a Standard and a compressed Flash build."""

__version__ = "0.1.0"
