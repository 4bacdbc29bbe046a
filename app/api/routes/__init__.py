"""The routes, one module a subject.

A route that generates is a door (app.intake.door): a parser of its body and a renderer of its answer, as in
`doors.py`. `app.api.app` mounts the routes.
"""
