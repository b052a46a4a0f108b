"""The HTTP server: answers with probabilities, and OpenAI-style text with its uncertainty (extra ``serve``).

=================  =====================================================
``run.py``         binds the port, loads the run, serves until told to stop
``app.py``         the endpoints
``schemas.py``     what ``/v1/choices`` takes and gives; ``openai_schemas.py`` the same of text
``replies.py``     text in OpenAI's shapes, whole and in pieces
``desk.py``        hands requests to the worker and waits for it, but not for ever
``worker.py``      the one thread that owns the model: a bounded queue, in batches
``engine.py``      what that thread does
``evaluation.py``  how good the run is, for people who look at it
``web.py``         the page for people, whose files are in ``page/``
``gates.py``       what a request passes before the endpoints: counting, failures, token, size
``metrics.py``     figures for Prometheus
=================  =====================================================
"""
