"""How SGLang is started by us, in SGLang's own environment. Nothing else of the project imports it.

``serve.py`` is run by its path, so that this package need not be installed beside SGLang. No engine code is changed.
"""
