"""Authentication of the users' API: bearer tokens, each with a role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Depends, HTTPException
from fastapi.security import HTTPBearer
from starlette.requests import Request

from nas.infra.store import agents
from nas.infra.store.rows import ApiToken, Role
from nas.infra.store.store import Store
from nas.infra.web.off_loop import off_loop

_REALM = {"WWW-Authenticate": "Bearer", "Connection": "close"}
_documented = HTTPBearer(auto_error=False, bearerFormat="hilnas.NAME.SECRET", description="made by `nas token create`")


class TokenAccess:
    """Authenticates bearer tokens of this database, for `nas.measure.farm.agent_api.guarded` routes.

    Args:
        store: has the tokens; read at every request, so that a revoked token is refused at once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def caller(self, request: Request) -> str:
        """Returns the name of the request's token.

        Raises:
            HTTPException: 401, it has no valid token.
        """
        scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
        token = None
        if scheme.lower() == "bearer":
            token = await off_loop(agents.authenticate_api_token, self._store, secret.strip())
        if token is None:
            raise HTTPException(
                401, "give a valid API token: 'Authorization: Bearer ...'; 'nas token create' makes one", _REALM
            )
        request.state.token = token
        return token.name


def require(needed: Role) -> Any:
    """Returns a dependency of a guarded route: the caller's token, or 403 if its role is too low."""
    return Depends(_check(needed), use_cache=False)


def _check(needed: Role) -> Callable[..., ApiToken]:
    def check(request: Request, credentials: object = Depends(_documented)) -> ApiToken:
        token: ApiToken = request.state.token
        if not token.role.includes(needed):
            raise HTTPException(403, f"this needs role {needed}; token {token.name!r} has role {token.role}")
        return token

    return check
