"""The routes, one module a subject.

A route that generates is an endpoint (app.intake.endpoint): a parser of its body and a renderer of its
answer, as in `endpoints.py`. `app.api.app` mounts the routes.
"""
