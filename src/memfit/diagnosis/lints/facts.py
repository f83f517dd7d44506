"""What the static rules know about PyTorch: which calls make, keep and cut a graph, save what, write where.

Names are the last part of the dotted name, the same for `torch.relu`, `F.relu` and `tensor.relu`. Sources: the documentation of
torch.autograd and `tools/autograd/derivatives.yaml` of PyTorch (what a formula reads is what the node saves).
"""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    """The words of a text as a set: shorter to read than a list of strings."""
    return frozenset(text.split())


# Make a tensor out of nothing that carries a graph.
FACTORIES = words(
    "arange as_tensor bernoulli empty empty_like eye from_numpy full full_like linspace load_image normal ones ones_like "
    "rand rand_like randint randn randn_like randperm tensor tril_indices triu_indices zeros zeros_like"
)
# Results that carry no graph whatever goes in: numbers, indices, truth values, data.
CUTS = words(
    "all any argmax argmin argsort bincount bool byte count_nonzero data data_ptr detach detach_ device dim dtype "
    "element_size eq equal ge get_device grad grad_fn gt int is_contiguous is_cuda is_floating_point is_leaf isclose "
    "isfinite isinf isnan item le long lt name ndim ndimension ne nelement new_empty new_ones new_tensor new_zeros nonzero "
    "numel numpy one_hot ones_like output_nr rand_like randn_like requires_grad round_to_int searchsorted shape short sign "
    "size storage stride tolist type unique untyped_storage zeros_like"
)
# Builtins that answer with plain Python values.
PLAIN = words(
    "abs bool float format getattr hasattr hash id input int isinstance issubclass len open ord print repr round str type vars"
)
# Same storage as the receiver, so a write through one is seen through the other.
VIEWS = words(
    "T chunk data detach diagonal expand expand_as flatten mT movedim narrow permute real reshape select split squeeze "
    "swapaxes t to_dense transpose unbind unflatten unsqueeze view view_as"
)
# Move or cast: of a module the same module, of a tensor the same graph.
MOVES = words("bfloat16 clone contiguous cpu cuda double float half to to_empty type_as xpu")
# Their backward reads their own result: writing into it breaks backward.
SAVE_OUTPUT = words("exp expm1 log_softmax relu rsqrt sigmoid softmax sqrt tanh")
MODULE_OPS = {"ReLU": "relu", "Sigmoid": "sigmoid", "Softmax": "softmax", "Tanh": "tanh", "LogSoftmax": "log_softmax"}
# Without parameters: called, they carry a graph only if their input does.
WITHOUT_PARAMETERS = words(
    "AdaptiveAvgPool1d AdaptiveAvgPool2d AvgPool1d AvgPool2d CELU Dropout Dropout1d Dropout2d Dropout3d AlphaDropout ELU "
    "Flatten GELU GLU Hardswish Hardtanh Identity LeakyReLU LogSigmoid LogSoftmax MaxPool1d MaxPool2d Mish PixelShuffle "
    "RReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax Softplus Tanh Unflatten Upsample ZeroPad2d"
)
DROPOUTS = words("AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout alpha_dropout dropout dropout2d")
BATCH_NORMS = words("BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm LazyBatchNorm1d LazyBatchNorm2d batch_norm")
NORMS = BATCH_NORMS | words("GroupNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d LayerNorm LocalResponseNorm RMSNorm")
CONVOLUTIONS = words("Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d")
# In place their backward reads the result, out of place the input (measured: one map a layer less).
INPLACE_SAVES_LESS = words("CELU ELU LeakyReLU RReLU")
# These keep their log-softmax, not the logits that went in.
CROSS_ENTROPIES = words("CrossEntropyLoss cross_entropy")
INPLACE_FLAG = words(
    "AlphaDropout CELU Dropout Dropout2d Dropout3d ELU Hardswish Hardtanh LeakyReLU Mish RReLU ReLU ReLU6 SELU SiLU "
    "Threshold alpha_dropout celu dropout dropout2d dropout3d elu hardswish hardtanh leaky_relu mish relu relu6 rrelu selu "
    "silu threshold"
)
OUT_OF_MEMORY = words("OutOfMemoryError RuntimeError")
NO_GRAD = words(
    "torch.no_grad torch.inference_mode torch.autograd.no_grad torch.autograd.inference_mode torch.autograd.grad_mode.no_grad"
)
# What every nn.Module has, so that `self.train(...)` is no layer.
MODULE_METHODS = words(
    "T_destination add_module apply bfloat16 buffers call_super_init children compile cpu cuda double dump_patches eval "
    "extra_repr float forward get_buffer get_extra_state get_parameter get_submodule half ipu load_state_dict modules mtia "
    "named_buffers named_children named_modules named_parameters parameters register_backward_hook register_buffer "
    "register_forward_hook register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook "
    "register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module register_parameter "
    "register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule share_memory "
    "state_dict to to_empty train training type xpu zero_grad"
)
# How programs name what they do not build themselves.
_VERBS = (
    "build",
    "convert",
    "create",
    "for",
    "from",
    "get",
    "has",
    "init",
    "is",
    "load",
    "make",
    "prepare",
    "run",
    "save",
    "set",
    "to",
    "train",
)
MODULE_WORDS = words(
    "actor backbone classifier critic d decoder discriminator ema encoder g gen generator generatornet head lstm gru rnn "
    "model models module net netd netg network policy resnet student teacher unet transformer"
)
LOSS_WORDS = ("loss", "criterion", "crit", "objective", "cross_entropy")
EVALUATION_WORDS = words("eval evaluate evaluation infer inference predict score test val valid validate validation")


def words_of(name: str) -> set[str]:
    """{'validate', 'one', 'epoch'} of 'validate_one_epoch' or 'ValidateOneEpoch'."""
    spaced = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return {word for word in spaced.replace(".", "_").split("_") if word}


def is_module_word(name: str) -> bool:
    """Whether a variable called `name` is a network in most programs: `model`, `self.netD`, `student_model`, `encoder2`."""
    last = name.rpartition(".")[2].rstrip("0123456789").strip("_").lower()
    if last.startswith(_VERBS) and last not in MODULE_WORDS:
        return False
    return last in MODULE_WORDS or last.endswith(("model", "net", "network", "_encoder", "_decoder"))


def is_loss_word(name: str) -> bool:
    """Whether something called `name` computes or holds a loss."""
    return any(word in name.rpartition(".")[2].lower() for word in LOSS_WORDS)
