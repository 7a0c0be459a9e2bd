"""The compiled kernel; everything else about packaging is in pyproject.toml.

Not in pyproject.toml because setuptools calls its table for extensions experimental.
"""

from __future__ import annotations

import sysconfig

from setuptools import Extension, setup

# One wheel per platform for every Python from 3.10 on. Builds without the GIL have no limited API.
limited = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "smdist.kernel._native",
            sources=["smdist/kernel/_native.c"],
            depends=["smdist/kernel/_native_variants.h"],  # also puts it into the sdist
            define_macros=[("Py_LIMITED_API", "0x030A0000")] if limited else [],
            py_limited_api=limited,
            extra_compile_args=["-O3"],
            # Without a compiler the installation succeeds and smdist.kernel falls back to numpy.
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if limited else {},
)
