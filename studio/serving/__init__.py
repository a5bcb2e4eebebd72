"""Who may ask the page for what: the guard before every route, logins, uploads, file answers.

Read: request_origin, allowed_hosts, responses, api_calls, content_security_policy, credentials, file_answers,
    login_page, login_throttle, guard, sessions, uploads, server.
Public: allowed_hosts, credentials, server, sessions.
"""
