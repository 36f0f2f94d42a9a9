"""Tools of this repository's maintainers. They run from a checkout
(``python -m eesd.bench.tools.NAME``); wheels lack them."""
