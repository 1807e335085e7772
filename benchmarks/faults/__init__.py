"""The parts of `fault_campaign.py`."""
