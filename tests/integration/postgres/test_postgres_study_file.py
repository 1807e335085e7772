from test_analysis_archive_files import *  # noqa: F403
