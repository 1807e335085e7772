"""Who may use the users' API: the holders of API tokens, each as far as the token's role goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from nas.store import api_tokens
from nas.store.rows import ApiToken, Role
from nas.store.store import Store

_RANK = {Role.READ: 0, Role.OPERATE: 1, Role.ADMIN: 2}
_bearer = HTTPBearer(auto_error=False, bearerFormat="hilnas.NAME.SECRET", description="made by `nas token create`")


class Access:
    """Turns Authorization headers into tokens of this database.

    Args:
        store: where the tokens are; asked at every request, so that a revoked one is worth nothing at once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def require(self, needed: Role) -> Any:
        """A FastAPI dependency that gives the caller's token, or refuses: 401, or 403 where its role is too low."""
        return Depends(self._check(needed))

    def _check(self, needed: Role) -> Callable[..., ApiToken]:
        def check(
            request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
        ) -> ApiToken:
            token = api_tokens.authenticate(self._store, given.credentials) if given else None
            if token is None:
                why = "give a valid API token: 'Authorization: Bearer ...'; 'nas token create' makes one"
                raise HTTPException(401, why, {"WWW-Authenticate": "Bearer"})
            if _RANK[token.role] < _RANK[needed]:
                raise HTTPException(403, f"this needs role {needed}; token {token.name!r} has role {token.role}")
            request.scope["user"] = token.name
            return token

        return check
