"""`slime pull-weights`, of the distribution that has the weight transport `delta`."""

from slime_weight_transport_delta.command import add_parser as add_parser
from slime_weight_transport_delta.command import run as run
