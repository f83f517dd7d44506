"""The codes of all findings, each with a line that says what it is. `memfit explain CODE` has the long text.

1xx what grows, 2xx what is alive for nothing, 3xx evaluation, 4xx gradients and optimizers, 5xx checkpointing, 6xx precision,
7xx in-place calls, 8xx calls that give nothing back, 9xx loading, data and means.
"""

from __future__ import annotations

CODES = {
    "MF101": "a sum over steps keeps every step's graph and what is saved in it",
    "MF102": "a sum over steps keeps the graph nodes of losses sent backward",
    "MF103": "a list over steps keeps tensors with their graphs",
    "MF104": "a state carried from step to step keeps all earlier graphs",
    "MF105": "an attribute is computed from its own last value with the graph on",
    "MF106": "backward(create_graph=True) ties parameters to their gradients",
    "MF107": "a training step hands more than its loss to an epoch-end hook",
    "MF108": "retain_graph=True where no second backward comes",
    "MF111": "a stored exception keeps the frames of the failed step",
    "MF112": "a forward hook collects tensors that only a backward takes out",
    "MF113": "a hook and its module hold each other",
    "MF114": "a cache on a method owns every module it was called on",
    "MF115": "an object refers to itself and waits for the cycle collector",
    "MF116": "a view in a list keeps the whole tensor behind it",
    "MF117": "a metric keeps all predictions and nothing empties it",
    "MF118": "itertools.cycle keeps every batch of a loader",
    "MF131": "a list, dict, set or deque takes in more each step",
    "MF132": "the graph behind a name gets longer each step",
    "MF133": "a tensor is joined to what it was in the step before",
    "MF134": "steps that refer to themselves wait for the cycle collector",
    "MF135": "a gradient with a graph holds its own parameter",
    "MF136": "a kept exception holds the frames of the call that failed",
    "MF137": "a module is held by nothing but an lru_cache",
    "MF201": "logits or outputs outlive the loss that was made of them",
    "MF202": "the graph of the turn before is alive while the next one is built",
    "MF203": "a variable is dead and yet held at the peak",
    "MF204": "something holds what the step does not read again",
    "MF205": "an optimizer holds parameters that no module has",
    "MF211": "attention weights are built and nobody reads them",
    "MF212": "attention is written out and saves length x length matrices",
    "MF213": "hidden states or attentions are asked for and not read",
    "MF301": "an evaluation builds graphs that no backward goes through",
    "MF302": "an evaluation keeps every full output to reduce it at the end",
    "MF303": "a teacher runs with gradients on",
    "MF401": "zero_grad stands between forward and backward",
    "MF402": "gradients are kept as zeros through the forward",
    "MF403": "separate losses are added up before one backward",
    "MF404": "the critic's step runs backward through the generator",
    "MF405": "an optimizer step stands between a forward and its second backward",
    "MF406": "foreach=True holds intermediates of all parameters at once",
    "MF501": "checkpoint_sequential with one segment checkpoints nothing",
    "MF502": "a checkpoint around a single Linear saves nothing",
    "MF503": "checkpoint_sequential leaves a large remainder unchecked",
    "MF511": "a reentrant checkpoint gets no input that requires a gradient",
    "MF512": "batch norm inside a checkpoint updates its statistics twice",
    "MF513": "dropout inside a checkpoint that does not restore the random state",
    "MF514": "a reentrant checkpoint gets a keyword argument",
    "MF515": "a checkpointed module changes itself in forward",
    "MF516": "reentrant checkpoints under DDP with find_unused_parameters",
    "MF601": "gradients are clipped while still multiplied by the loss scale",
    "MF602": "weights in float16 are updated without a float32 copy",
    "MF603": "half-precision logits are copied to float32 for the loss",
    "MF604": "apex's amp.scale_loss is called before amp.initialize",
    "MF605": "apex.amp was removed from apex in 2025",
    "MF611": "an evaluation fills autocast's cache of cast weights",
    "MF701": "an in-place call writes into what backward reads",
    "MF702": "an in-place activation changes the skip path",
    "MF703": "an in-place call writes into a leaf that requires a gradient",
    "MF704": "an activation could be in place and save one map a layer",
    "MF801": "empty_cache() in every step",
    "MF802": "gc.collect() in every step",
    "MF803": "a retry runs inside the except block of an out-of-memory error",
    "MF804": "a `del` frees nothing: others hold the storage",
    "MF901": "a loaded checkpoint lives on beside the model",
    "MF902": "torch.load without map_location",
    "MF903": "to_empty() unties tied weights",
    "MF911": "a DataLoader with workers is made anew in every epoch",
    "MF912": "a dataset keeps many Python objects that workers copy by reading",
    "MF913": "nn.DataParallel fills the first device",
    "MF914": "a dataset keeps every sample in each worker",
    "MF921": "means of micro-batches of different size are averaged",
    "MF922": "batch norm sees parts of the batch",
}

# Those without a rule that reads source: seen in a run alone, by these verbs.
MEASURED_ONLY = {
    "MF131": "leaks",
    "MF132": "leaks",
    "MF133": "leaks",
    "MF134": "leaks",
    "MF135": "leaks",
    "MF136": "leaks",
    "MF137": "leaks",
    "MF203": "trace",
    "MF204": "trace",
    "MF205": "trace",
    "MF611": "run --precision",
    "MF804": "trace",
}


def expand_codes(asked: str) -> tuple[str, ...]:
    """('MF1', 'MF201') of 'MF1,mf201': codes and prefixes of codes, in capitals. Raises ValueError for what matches no code."""
    prefixes = tuple(part.strip().upper() for part in asked.split(",") if part.strip())
    for prefix in prefixes:
        if not any(code.startswith(prefix) for code in CODES):
            raise ValueError(f"{prefix!r} is no code of a finding and no beginning of one, like MF101 or MF1")
    return prefixes
