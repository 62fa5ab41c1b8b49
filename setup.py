"""Lets pip put train.py, the shipped configurations and the small assets into the package, as torchtitan/shipped."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["torchtitan*", "titan_*"]), "torchtitan.shipped"],
    package_dir={"torchtitan.shipped": "."},
    package_data={
        "torchtitan.shipped": ["requirements.txt", "train_configs/*", "tests/assets/*/*"],
        "titan_fleet.console": ["door/*.html", "pages/*.css", "pages/*.svg"],
    },
)
