"""Parts of `fault_campaign.py`."""
