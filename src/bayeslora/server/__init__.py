"""The HTTP server: answers with probabilities, and OpenAI-style text with its uncertainty (extra ``serve``).

==================  ====================================================================================
``run.py``          binds the port, serves until told to stop
``server.py``       uvicorn, with one deadline for its end
``connections.py``  how many connections there may be, and how long they may wait for their clients
``descriptors.py``  how many the limit of open files leaves room for
``hosts.py``        the names under which the server may be asked
``app.py``          the endpoints
``schemas.py``      what ``/v1/choices`` takes and gives; ``openai_schemas.py`` the same of text
``replies.py``      text in OpenAI's shapes, whole and in pieces
``dispatcher.py``   hands requests to the worker and waits for it, but not for ever
``worker.py``       the one thread that owns the model: a bounded queue, in batches
``engine.py``       what that thread does
``interrupt.py``    ends a forward pass in the middle
``trial.py``        whether the model predicts at all
``evaluation.py``   how good the run is, for people who look at it
``web.py``          the page for people, whose files are in ``page/``
``middleware.py``   what a request passes before the endpoints: counting, failures, token, size
``metrics.py``      figures for Prometheus
==================  ====================================================================================
"""
