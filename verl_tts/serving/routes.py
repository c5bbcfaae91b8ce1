"""What the server answers to, and nothing beside it.

vLLM and vLLM-Omni bring some fifty routes for every kind of model. Some end a TTS engine, some put it to sleep, one
keeps a client's recordings; a release may add others. vLLM puts this between them and the network (``--middleware``).
"""

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

ANSWERED = {
    "/v1/audio/speech": ("POST", "OPTIONS"),  # a browser asks for the options first
    "/generate": ("POST", "OPTIONS"),
    "/v1/models": ("GET", "OPTIONS"),  # OpenAI's clients ask for it
    "/health": ("GET",),
}


class AnsweredAlone:
    """404 for every other path or method; no websocket."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("method") in ANSWERED.get(scope["path"], ()):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
        else:
            message = f"there is no {scope['method']} {scope['path']:.80} here; there are: {', '.join(ANSWERED)}"
            await JSONResponse({"error": {"message": message}}, status_code=404)(scope, receive, send)
