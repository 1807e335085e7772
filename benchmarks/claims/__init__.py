"""Simulated studies of known truth: how often what hilnas states of a study is so."""
