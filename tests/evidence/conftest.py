"""What does the report's command share with the other verbs' tests?"""

from tests.cli.conftest import helios

__all__ = ["helios"]
