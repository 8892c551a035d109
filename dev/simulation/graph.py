"""The paper's simulator (arXiv 2501.18512, 3.1): a training step of L layers is a graph of 4L - 1 nodes.

    compute, one node after the other            link between workers, one node after the other

    forward 1, 2, ..., L                                                          L nodes
    backward by activations L, ..., 2            (layer 1 needs none)             L - 1
    backward by parameters  L, ..., 1            reduction of each layer          L + L

Backward by activations comes before backward by parameters of the same layer. A layer's reduction may begin
when its backward by parameters is done, in a step that sends the layer, and the layer's forward in step
s + 1 + tau waits for it. The link takes reductions in the order in which they become ready. Data-parallel
training sends all layers in every step, with tau = 0.

A period is computed without looking at each node: compute runs on until a layer arrives late or is sent.
"""
import numpy as np

from simulation.steady import steady_seconds

NODES_A_LAYER = 3  # of compute


def compute_seconds(layers, node_seconds):
    """Of a step: 3L - 1 nodes."""
    return (NODES_A_LAYER * layers - 1) * node_seconds


def nodes_until_gradient(layer, layers):
    """Compute nodes of a step up to the backward by parameters of `layer` (1..L), that one included."""
    return layers + 2 * (layers - layer + 1) - (layer == 1)


def simulate_step(now, link_free, due, sent, layers, node_seconds, reduction_seconds):
    """Advances both clocks by a step. due: {layer: when it has arrived}   sent: layers
    Returns the clocks and {layer: when it will have arrived}."""
    done, arrivals = 0, {}
    for layer in sorted(due):
        now = np.maximum(now + (layer - 1 - done) * node_seconds, due[layer])
        done = layer - 1
    for layer in sorted(sent, reverse=True):
        nodes = nodes_until_gradient(layer, layers)
        now = now + (nodes - done) * node_seconds
        link_free = np.maximum(now, link_free) + reduction_seconds
        done, arrivals[layer] = nodes, link_free
    return now + (NODES_A_LAYER * layers - 1 - done) * node_seconds, link_free, arrivals


def cycle_seconds(layers, node_seconds, sends, tau, reduction_seconds):
    """Seconds of a period once it repeats itself.
    sends: layers that are sent, for each step of a period   reduction_seconds: of a layer; an array, one for
    each link that is tried"""
    now, link_free = np.zeros_like(reduction_seconds), np.zeros_like(reduction_seconds)
    arrivals, step = {}, 0

    def simulate_period():
        nonlocal now, link_free, step
        for sent in sends:
            now, link_free, arrivals[step + 1 + tau] = simulate_step(
                now, link_free, arrivals.pop(step, {}), sent, layers, node_seconds, reduction_seconds)
            step += 1
        return now, [link_free, *(when for of_layers in arrivals.values() for when in of_layers.values())]

    return steady_seconds(simulate_period)


def utilization(layers, node_seconds, sends, tau, reduction_seconds):
    """Share of the time in which workers compute; an array like reduction_seconds."""
    period = len(sends) * compute_seconds(layers, node_seconds)
    return period / cycle_seconds(layers, node_seconds, sends, tau, np.asarray(reduction_seconds, float))
