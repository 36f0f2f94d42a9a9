"""A server in a thread on a real socket. It needs only the server's packages."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eesd.runtime.batch.service import Service
    from eesd.serve.http.options import ServeOptions, Serving


@contextmanager
def listening(service: "Service", options: "ServeOptions") -> Iterator[tuple[str, "Serving"]]:
    """Serve on a free port. Yields the address, and the state that the routes share. At the end,
    running requests finish."""
    from eesd.serve.app import make_app
    from eesd.serve.http.run import address_of, bind, serve

    app = make_app(service, options)
    bound = bind("127.0.0.1", 0)
    bound.listen()  # clients wait, instead of being refused, while the server starts
    thread = threading.Thread(target=serve, args=(app, bound))
    thread.start()
    try:
        yield address_of(bound), app.state.serving
    finally:
        app.state.serving.draining = True
        thread.join(30)
        assert not thread.is_alive()
