"""Settings of the Jupyter server that `make lab` starts.

Views of a timeline are small messages that follow others at once. With Nagle's algorithm, the server holds them back until the
browser has acknowledged the message before, which takes up to 40 ms (TCP's delayed acknowledgement).

JupyterLab asks the server whether it must be built again, which takes the server about a second while the page loads. Our front
ends are prebuilt and need no build.
"""

from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection


class PromptConnection(ZMQChannelsWebsocketConnection):
    """A kernel's connection to the browser that sends each message at once."""

    def connect(self):
        self.websocket_handler.set_nodelay(True)
        return super().connect()


server = get_config().ServerApp  # noqa: F821 (defined where Jupyter runs this file)
server.kernel_websocket_connection_class = PromptConnection
server.tornado_settings = {"page_config_data": {"buildCheck": False, "buildAvailable": False}}
