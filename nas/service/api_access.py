"""Who may use the users' API: the holders of API tokens, each as far as the token's role goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Depends, HTTPException
from fastapi.security import HTTPBearer
from starlette.requests import Request

from nas.service.off_loop import off_loop
from nas.store import api_tokens
from nas.store.rows import ApiToken, Role
from nas.store.store import Store

_RANK = {Role.READ: 0, Role.OPERATE: 1, Role.ADMIN: 2}
_REALM = {"WWW-Authenticate": "Bearer", "Connection": "close"}
_documented = HTTPBearer(auto_error=False, bearerFormat="hilnas.NAME.SECRET", description="made by `nas token create`")


class TokenAccess:
    """Bearer tokens of this database, for `nas.service.agent_access.guarded` routes.

    Args:
        store: where the tokens are; asked at every request, so that a revoked one is worth nothing at once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def caller(self, request: Request) -> str:
        """The name of the token that the request shows.

        Raises:
            HTTPException: 401, it shows none that is good.
        """
        scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
        token = None
        if scheme.lower() == "bearer":
            token = await off_loop(api_tokens.authenticate, self._store, secret.strip())
        if token is None:
            raise HTTPException(
                401, "give a valid API token: 'Authorization: Bearer ...'; 'nas token create' makes one", _REALM
            )
        request.state.token = token
        return token.name


def require(needed: Role) -> Any:
    """A dependency of a guarded route: gives the caller's token, or refuses with 403 where its role is too low."""
    return Depends(_check(needed), use_cache=False)


def _check(needed: Role) -> Callable[..., ApiToken]:
    def check(request: Request, shown: object = Depends(_documented)) -> ApiToken:
        token: ApiToken = request.state.token
        if _RANK[token.role] < _RANK[needed]:
            raise HTTPException(403, f"this needs role {needed}; token {token.name!r} has role {token.role}")
        return token

    return check
