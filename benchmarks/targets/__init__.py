"""One table of layouts on all targets of this machine: what the best layout of one loses on another.

python -m benchmarks.targets run FOLDER [--minutes 35] [--rounds 3] [--layouts 64]     measures what is missing
python -m benchmarks.targets train FOLDER                                              quality, by short proxies
python -m benchmarks.targets page                                                      docs/measured/targets.md
"""
