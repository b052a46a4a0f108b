"""The HTTP server: answers with probabilities, and OpenAI-style text with its uncertainty (extra ``serve``).

==================  ====================================================================================
``announcement.py``  tells other commands of this user that the server runs
``client.py``       asks a server that was announced
``resident.py``     starts and ends servers that keep a model in memory for ``bayeslora predict``
``libraries.py``    the libraries that a server needs
``bearer.py``       the bearer token
``run.py``          binds the port, and serves until a signal to stop
``server.py``       uvicorn with a deadline for shutdown
``connections.py``  limits on the number of connections, and on the time they wait for clients
``descriptors.py``  the number of connections that the limit on open files allows
``hosts.py``        checks the ``Host`` header
``app.py``          the endpoints
``schemas.py``      requests and responses of ``/v1/choices``; ``openai_schemas.py`` those for text
``replies.py``      text in OpenAI's formats, complete and streamed
``dispatcher.py``   queues requests for the worker and waits for the results, with a timeout
``worker.py``       the thread that owns the model: a bounded queue, processed in batches
``engine.py``       the model's work in that thread
``idle.py``         how long the model has not been asked anything
``interrupt.py``    interrupts a forward pass
``trial.py``        checks that predictions are finite
``evaluation.py``   metrics of the run, for the web page
``web.py``          the web page, whose files are in ``page/``
``middleware.py``   metrics, unexpected errors, bearer token, and limits on requests
``metrics.py``      metrics for Prometheus
==================  ====================================================================================
"""
