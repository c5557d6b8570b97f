"""Layers, operators, data sets and initializers of MindSpore, and torch's names for them.

Source: MindSpore's table "PyTorch and MindSpore API mapping", which says where the two agree, where
parameters have other names, and where they differ; defaults from MindSpore 2.7.
"""

from collections.abc import Mapping
from types import MappingProxyType

from mfwrap.names.texts import Without, each

_RENAMED = "{}, whose parameters have other names"
_DIFFERENT = "{}, whose arguments or defaults differ"
_PADDING = "`torch.nn.{}`; MindSpore's pads to the same size and has no bias by default"
_POOLING = "`torch.nn.{}`, whose stride is `kernel_size` by default; MindSpore's is 1"
_MOMENTUM = "`torch.nn.{}`, whose `momentum` is 1 minus MindSpore's"
_TRANSPOSED = "`torch.matmul`, with `x.mT` for a tensor that `{}` or `{}` transposes"

_NN: Mapping[str, str] = {
    "ClipByNorm": "`torch.clamp(max_norm / x.norm(), max=1) * x`, or `mfwrap.clip_by_global_norm` "
    "for all gradients together",
    "CELU": "`torch.nn.CELU`",
    "Dense": "`torch.nn.Linear`",
    "Dropout": "`torch.nn.Dropout(p=1 - keep_prob)`, or with the same `p`",
    "Embedding": "`torch.nn.Embedding`, whose `weight` is `embedding_table`, with initial values "
    "of deviation 1; MindSpore's have 0.01",
    "GELU": "`torch.nn.GELU(approximate='tanh')`, or `torch.nn.GELU()` for `approximate=False`",
    "GroupNorm": "`torch.nn.GroupNorm`",
    "LayerNorm": "`torch.nn.LayerNorm`, whose `eps` is 1e-5 by default; MindSpore's is 1e-7",
    "LogSoftmax": "`torch.nn.LogSoftmax`",
    "Norm": "`torch.linalg.vector_norm`",
    "OneHot": "`torch.nn.functional.one_hot`, which has no `on_value` and `off_value`",
    "Pad": "`torch.nn.functional.pad`, whose order of paddings differs",
    "SeLU": "`torch.nn.SELU`",
    "MatMul": _TRANSPOSED.format("transpose_x1", "transpose_x2"),
    "Range": "`torch.arange`",
    "ResizeBilinear": "`torch.nn.functional.interpolate(x, size, mode='bilinear')`",
    "SoftmaxCrossEntropyWithLogits": "`torch.nn.CrossEntropyLoss`, which takes class indices of "
    "int64 and averages by default",
    **each("BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm", _MOMENTUM),
    **each("Conv1d Conv2d Conv3d", _PADDING),
    **each(
        "Conv1dTranspose=ConvTranspose1d Conv2dTranspose=ConvTranspose2d "
        "Conv3dTranspose=ConvTranspose3d",
        _PADDING,
    ),
    **each("AvgPool1d AvgPool2d AvgPool3d MaxPool1d MaxPool2d MaxPool3d", _POOLING),
    **each(
        "AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool2d AdaptiveMaxPool3d BCELoss CTCLoss "
        "ChannelShuffle ConstantPad1d ConstantPad2d ConstantPad3d CosineEmbeddingLoss Dropout2d "
        "Dropout3d ELU Flatten Hardtanh HingeEmbeddingLoss Hsigmoid=Hardsigmoid Hswish=Hardswish "
        "HSigmoid=Hardsigmoid HSwish=Hardswish HuberLoss KLDivLoss L1Loss LPPool1d LPPool2d "
        "LogSigmoid MSELoss MarginRankingLoss MaxUnpool1d MaxUnpool2d MaxUnpool3d "
        "MultiLabelSoftMarginLoss MultiMarginLoss MultilabelMarginLoss=MultiLabelMarginLoss "
        "PixelShuffle PixelUnshuffle PoissonNLLLoss RReLU ReLU ReLU6 ReflectionPad1d "
        "ReflectionPad2d ReplicationPad1d ReplicationPad2d ReplicationPad3d SiLU Sigmoid "
        "SoftMarginLoss Softmax2d Softsign Tanh Tanhshrink Threshold ZeroPad2d",
        "`torch.nn.{}`",
    ),
    "Adadelta": "`torch.optim.Adadelta`",
    "ASGD": "`torch.optim.ASGD`, whose `lr` is 0.01 by default; MindSpore's `learning_rate` is 0.1",
    "SGD": "`torch.optim.SGD`, whose `lr` is 0.001 by default; MindSpore's `learning_rate` is 0.1",
    **each("Identity Unflatten", _RENAMED.format("`torch.nn.{}`")),
    **each(
        "AdaptiveAvgPool1d AdaptiveMaxPool1d BCEWithLogitsLoss BiDense=Bilinear CrossEntropyLoss "
        "GRU GRUCell GaussianNLLLoss HShrink=Hardshrink InstanceNorm1d InstanceNorm2d "
        "InstanceNorm3d LRN=LocalResponseNorm LSTM LSTMCell LeakyReLU MultiheadAttention NLLLoss "
        "PReLU RNN RNNCell SmoothL1Loss SoftShrink=Softshrink Softmax Softmin Transformer "
        "TransformerDecoder TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer "
        "TripletMarginLoss Unfold Upsample",
        _DIFFERENT.format("`torch.nn.{}`"),
    ),
    **each("Adagrad Adam Rprop", _DIFFERENT.format("`torch.optim.{}`")),
}

_NO_OPERATOR = "nothing: statements of torch run in their order"
_STATUS = (
    "nothing: `get_overflow_status` of a training cell, or `mfwrap.all_finite`, looks at the "
    "gradients themselves"
)
_RESIZED = "`torch.nn.functional.interpolate` with a `mode`"
_GATHERED = "`torch.index_select` for indices of one dimension, otherwise `x[indices]`"
_IN_PLACE = "`parameter.{}` within `torch.no_grad()`"

_OPS: Mapping[str, str] = {
    "ArgMaxWithValue": "`torch.max(x, dim)`, which returns the value first",
    "ArgMinWithValue": "`torch.min(x, dim)`, which returns the value first",
    **each(
        "Argmax=argmax Argmin=argmin",
        "`torch.{}(x, dim=-1)`, because torch takes the whole tensor by default",
    ),
    "AllGather": "`torch.distributed.all_gather_into_tensor`",
    "AllReduce": "`torch.distributed.all_reduce`, which works in place; a training cell's "
    "`grad_reducer` for gradients",
    "CumSum": "`torch.cumsum`; for `exclusive` subtract `x` from the sum, for `reverse` flip `x` "
    "before and the sum after",
    "BiasAdd": "`x + bias` for two dimensions; otherwise `bias` is shaped to the second one",
    "Broadcast": "`torch.distributed.broadcast`",
    "Conv2D": _DIFFERENT.format("`torch.nn.functional.conv2d`"),
    "Depend": _NO_OPERATOR,
    "DType": "`x.dtype`",
    "ControlDepend": _NO_OPERATOR,
    "Cast": "`x.to(dtype)`",
    "Dropout": "`torch.nn.functional.dropout(x, p=1 - keep_prob)`, which returns no mask",
    "Fill": "`torch.full`",
    "Flatten": "`torch.flatten(x, start_dim=1)`",
    "GatherD": "`torch.gather`",
    **each("GeLU Gelu", "`torch.nn.functional.gelu(x, approximate='tanh')`"),
    "HyperMap": "`hyper_map` of a training cell, or a Python loop",
    "IOU": "`torchvision.ops.box_iou`",
    "Identity": "nothing: the value itself",
    "L2Normalize": "`torch.nn.functional.normalize(x, dim=0, eps=0.01)`, which has MindSpore's "
    "defaults: `eps` is the root of `epsilon`",
    "Meshgrid": "`torch.meshgrid` with `indexing='xy'`, which is MindSpore's default",
    "Map": "`hyper_map` of a training cell, or a Python loop",
    **each("BatchMatMul MatMul", _TRANSPOSED.format("transpose_a", "transpose_b")),
    "MultitypeFuncGraph": "nothing: a Python function, without `register`",
    "NMSWithMask": "`torchvision.ops.nms`",
    "OneHot": "`torch.nn.functional.one_hot`, which has no `on_value` and `off_value`",
    "Partial": "`functools.partial`",
    "Print": "`print`",
    "Rank": "`x.ndim`",
    "L2Loss": "`x.square().sum() / 2`",
    "Pad": "`torch.nn.functional.pad`, whose order of paddings differs",
    "ReduceOp": "`torch.distributed.ReduceOp`",
    "ROIAlign": "`torchvision.ops.roi_align`",
    "Shape": "`x.shape`",
    "SigmoidCrossEntropyWithLogits": "`torch.nn.functional.binary_cross_entropy_with_logits` with "
    "`reduction='none'`",
    "Slice": "`x[begin:begin + size]` in each dimension",
    "StandardNormal": "`torch.randn`",
    "StridedSlice": "`x[begin:end:stride]` in each dimension",
    "TensorSummary": "`torch.utils.tensorboard.SummaryWriter`",
    "ScalarSummary": "`torch.utils.tensorboard.SummaryWriter`",
    "Size": "`x.numel()`",
    "Split": "`torch.chunk`, because MindSpore's operator takes the number of parts",
    "Transpose": "`x.permute`",
    "UniformReal": "`torch.rand`",
    "make_range": "Python's `range`",
    "add_flags": "nothing: flags are for MindSpore's compiler",
    "assign": _IN_PLACE.format("copy_(value)"),
    "assign_add": _IN_PLACE.format("add_(value)"),
    "assign_sub": _IN_PLACE.format("sub_(value)"),
    "Assign": _IN_PLACE.format("copy_(value)"),
    "AssignAdd": _IN_PLACE.format("add_(value)"),
    "AssignSub": _IN_PLACE.format("sub_(value)"),
    "cast": "`x.to(dtype)`",
    "clip_by_norm": "`torch.clamp(max_norm / x.norm(), max=1) * x`, or "
    "`mfwrap.clip_by_global_norm` for all gradients together",
    "concat": "`torch.cat`",
    "constexpr": "nothing: a plain Python function",
    "control_depend": _NO_OPERATOR,
    "depend": _NO_OPERATOR,
    "dtype": "`x.dtype`",
    "expand_dims": "`torch.unsqueeze`",
    "fill": "`torch.full`",
    "flatten": "`torch.flatten(x, start_dim=1)`",
    "gather": _GATHERED,
    "get_grad": "`dict(gradients)[identifier]`: with `return_ids` each gradient comes with its id",
    "identity": "nothing: the value itself",
    "is_tensor": "`torch.is_tensor`",
    "isinstance_": "`isinstance`",
    "jacfwd": "`torch.func.jacfwd`",
    "jacrev": "`torch.func.jacrev`",
    "jvp": "`torch.func.jvp`",
    "mixed_precision_cast": "`x.to(dtype)`, or `torch.autocast` around the network",
    "one_hot": "`torch.nn.functional.one_hot`, which has no `on_value` and `off_value`",
    "partial": "`functools.partial`",
    "print_": "`print`",
    "rank": "`x.ndim`",
    "scalar_to_array": "`torch.tensor`",
    "scalar_to_tensor": "`torch.tensor`",
    "shape": "`x.shape`",
    "size": "`x.numel()`",
    "standard_normal": "`torch.randn`",
    "stop_gradient": "`x.detach()`",
    "tensor_dot": "`torch.tensordot`",
    "transpose": "`x.permute`",
    "tuple_to_array": "`torch.tensor`",
    "vjp": "`torch.func.vjp`",
    "vmap": "`torch.func.vmap`",
    **each(
        "FloatStatus NPUAllocFloatStatus NPUClearFloatStatus NPUClearFloatStatusV2 "
        "NPUGetFloatStatus NPUGetFloatStatusV2 AllFinite",
        _STATUS,
    ),
    **each("AddN=sum addn=sum", "Python's `sum`, or `+`"),
    **each(
        "Abs=abs Acos=acos Add=add Asin=asin Atan=atan Ceil=ceil "
        "Concat=cat Cos=cos Div=div Equal=eq Erf=erf Exp=exp ExpandDims=unsqueeze "
        "Expm1=expm1 Eye=eye Floor=floor FloorDiv=floor_divide Greater=gt GreaterEqual=ge "
        "Inv=reciprocal IsFinite=isfinite IsInf=isinf IsNan=isnan Less=lt LessEqual=le "
        "LinSpace=linspace Log=log Log1p=log1p LogSoftmax=log_softmax LogicalAnd=logical_and "
        "LogicalNot=logical_not LogicalOr=logical_or Maximum=maximum Minimum=minimum Mul=mul "
        "Neg=neg NotEqual=ne Ones=ones OnesLike=ones_like Pow=pow Range=arange ReLU=relu "
        "RealDiv=div Reciprocal=reciprocal ReduceAll=all ReduceAny=any ReduceMax=amax "
        "ReduceMean=mean ReduceMin=amin ReduceProd=prod ReduceSum=sum Reshape=reshape Round=round "
        "Rsqrt=rsqrt Select=where Sigmoid=sigmoid Sign=sign Sin=sin Softmax=softmax Sort=sort "
        "Sqrt=sqrt Square=square Squeeze=squeeze Stack=stack Sub=sub Tan=tan Tanh=tanh "
        "TensorAdd=add Tile=tile TopK=topk Unstack=unbind Zeros=zeros ZerosLike=zeros_like",
        "`torch.{}`, called with the tensors and the operator's arguments",
    ),
    **each("Gather GatherV2", _GATHERED),
    **each("GatherNd gather_nd", "`x[tuple(indices.unbind(-1))]`"),
    **each("ResizeBilinear ResizeNearestNeighbor", _RESIZED),
    **each("MaxPool=max_pool2d AvgPool=avg_pool2d", _DIFFERENT.format("`torch.nn.functional.{}`")),
    **each(
        "BroadcastTo=broadcast_to Einsum=einsum MaskedFill=masked_fill ReverseV2=flip "
        "gather_d=gather masked_fill repeat_elements=repeat_interleave top_k=topk unstack=unbind",
        "`torch.{}`, called with the tensors and the operator's arguments",
    ),
    **each(
        "abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv angle arange arccos "
        "arccosh arcsinh arctan arctanh argmax asin asinh atan atan2 atanh baddbmm bartlett_window "
        "bincount bitwise_and bitwise_or bitwise_xor blackman_window ceil cholesky_solve clamp "
        "clip column_stack conj cosh cross cumprod diag_embed diagflat diagonal digamma dist div "
        "divide einsum equal=eq erf erfc exp exp2 expm1 eye flip fliplr flipud floor_divide fmax "
        "fmod full full_like gather_elements=gather gcd geqrf greater greater_equal hamming_window "
        "hann_window heaviside histc hsplit hstack hypot i0 igamma igammac imag inner inverse "
        "is_nonzero isinf isneginf isposinf isreal kaiser_window kron lcm lerp log1p logaddexp "
        "logaddexp2 logdet logical_and logical_not logical_or logical_xor logit logspace lt "
        "lu_solve lu_unpack masked_select matmul mm moveaxis movedim msort mul multiply nan_to_num "
        "nansum neg negative nextafter nonzero not_equal numel ones_like orgqr outer polar pow "
        "rand rand_like randn randn_like ravel real reciprocal relu remainder reshape roll rot90 "
        "round row_stack rsqrt searchsorted sgn sigmoid sign signbit sin sinc sinh slogdet square "
        "subtract sum swapaxes swapdims t tan tanh tensor_add=add tensor_div=div "
        "tensor_exp=exp tensor_ge=ge tensor_gt=gt tensor_le=le tensor_lt=lt tensor_mul=mul "
        "tensor_pow=pow tensor_sub=sub topk trace trapz tril tril_indices triu triu_indices "
        "true_divide trunc unbind unsqueeze vander view_as_real "
        "vsplit where xlogy zeros_like",
        "`torch.{}`",
    ),
    **each("cond eigvals norm", "`torch.linalg.{}`"),
    **each(
        "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d affine_grid bidense=bilinear "
        "conv1d conv2d conv3d cosine_similarity cross_entropy ctc_loss dense=linear gumbel_softmax "
        "hardsigmoid hardtanh hinge_embedding_loss l1_loss margin_ranking_loss max_pool3d "
        "max_unpool1d max_unpool2d max_unpool3d mse_loss multi_margin_loss "
        "multilabel_margin_loss multilabel_soft_margin_loss nll_loss pdist pixel_shuffle "
        "pixel_unshuffle smooth_l1_loss soft_margin_loss tanhshrink unfold",
        "`torch.nn.functional.{}`",
    ),
    **each(
        "addr arcsin argsort atleast_1d atleast_2d atleast_3d block_diag bmm cholesky chunk "
        "combinations copysign count_nonzero cummax cummin cumsum diff dstack frac ge gt "
        "index_select is_complex is_floating_point isfinite isnan ldexp le less less_equal "
        "logcumsumexp logsumexp maximum mean minimum mv narrow ne ormqr randperm "
        "repeat_interleave select=where sort split sqrt squeeze stack sub tensor_split tile "
        "unique_consecutive vstack",
        _RENAMED.format("`torch.{}`"),
    ),
    **each(
        "batch_norm binary_cross_entropy binary_cross_entropy_with_logits celu glu hardshrink "
        "hardswish logsigmoid lp_pool1d lp_pool2d prelu relu6 rrelu selu silu softshrink softsign "
        "threshold",
        _RENAMED.format("`torch.nn.functional.{}`"),
    ),
    **each(
        "all amax amin any argmin bernoulli broadcast_to bucketize cat cdist cos deg2rad diag "
        "erfinv float_power floor ger isclose linspace log log10 log2 max median meshgrid "
        "min multinomial mvlgamma normal ones polygamma prod rad2deg randint randint_like "
        "reduce_max=amax reduce_mean=mean reduce_min=amin reduce_sum=sum renorm scatter std "
        "std_mean svd unique var var_mean zeros",
        _DIFFERENT.format("`torch.{}`"),
    ),
    **each(
        "adaptive_avg_pool1d adaptive_max_pool1d avg_pool1d avg_pool2d avg_pool3d "
        "cosine_embedding_loss dropout dropout2d dropout3d elu fold gelu grid_sample interpolate "
        "kl_div leaky_relu log_softmax max_pool2d pad softmax softmin triplet_margin_loss upsample",
        _DIFFERENT.format("`torch.nn.functional.{}`"),
    ),
}

_TRANSFORM = "`torchvision.transforms.{}`"

_SHUFFLED = (
    " in a `torch.utils.data.DataLoader` with `shuffle=True`, because MindSpore shuffles by default"
)

_DATASET: Mapping[str, str] = {
    "BatchInfo": "`collate_fn` of `torch.utils.data.DataLoader`, which gets the rows alone",
    "DistributedSampler": "nothing: `mfwrap.Model` and accelerate divide a DataLoader among ranks",
    "GeneratorDataset": "`torch.utils.data.DataLoader` with `shuffle=True`, because MindSpore "
    "shuffles a source with `__getitem__` by default",
    "MindDataset": Without("torch reads no MindRecord files; convert them once, with MindSpore"),
    "NumpySlicesDataset": "`torch.utils.data.TensorDataset`" + _SHUFFLED,
    "PKSampler": Without("torch has no such sampler; write a `torch.utils.data.Sampler`"),
    "Dataset": "`torch.utils.data.DataLoader`",
    "Sampler": "`torch.utils.data.Sampler`",
    "SubsetSampler": "`torch.utils.data.Subset`",
    "TFRecordDataset": Without("torch reads no TFRecord files"),
    "config": "arguments of `torch.utils.data.DataLoader`, such as `num_workers`",
    "zip": "`torch.utils.data.StackDataset`",
    **each(
        "Cifar100Dataset=CIFAR100 Cifar10Dataset=CIFAR10 FashionMnistDataset=FashionMNIST "
        "ImageFolderDataset=ImageFolder MnistDataset=MNIST",
        "`torchvision.datasets.{}`" + _SHUFFLED,
    ),
    **each(
        "CelebADataset=CelebA CityscapesDataset=Cityscapes CocoDataset=CocoDetection "
        "VOCDataset=VOCDetection",
        _DIFFERENT.format("`torchvision.datasets.{}`") + "," + _SHUFFLED,
    ),
    **each(
        "RandomSampler SequentialSampler SubsetRandomSampler WeightedRandomSampler",
        _DIFFERENT.format("`torch.utils.data.{}`"),
    ),
}

_TRANSFORMS: Mapping[str, str] = {
    "HWC2CHW": "`torchvision.transforms.ToTensor`, which also divides by 255",
    "OneHot": "`torch.nn.functional.one_hot`",
    "RandomCropDecodeResize": "`torchvision.transforms.RandomResizedCrop` of an image of PIL",
    "Decode": "`PIL.Image.open`, in `__getitem__` of the data set",
    "Rescale": "`lambda x: x * rescale + shift`; `torchvision.transforms.ToTensor` divides by 255",
    "RandomColorAdjust": "`torchvision.transforms.ColorJitter`",
    "ToPIL": "`torchvision.transforms.ToPILImage`",
    "ToTensor": "`torchvision.transforms.ToTensor`",
    "TypeCast": "`x.to(dtype)`, in `__getitem__` of the data set",
    "Inter": "`torchvision.transforms.InterpolationMode`",
    "Normalize": "`torchvision.transforms.Normalize` after `ToTensor`, with mean and deviation "
    "divided by 255",
    "Resize": "`torchvision.transforms.Resize`",
    **each(
        "CenterCrop Compose FiveCrop GaussianBlur Grayscale LinearTransformation RandomChoice "
        "RandomOrder",
        _TRANSFORM,
    ),
    **each(
        "Pad RandomApply RandomCrop RandomGrayscale RandomHorizontalFlip RandomVerticalFlip "
        "TenCrop",
        _RENAMED.format(_TRANSFORM),
    ),
    **each(
        "RandomAffine RandomErasing RandomPerspective RandomResizedCrop RandomRotation",
        _DIFFERENT.format(_TRANSFORM),
    ),
}

_INITIALIZER: Mapping[str, str] = {
    "Initializer": "a function of `torch.nn.init`",
    "Normal": "`torch.nn.init.normal_`, which takes the mean first",
    "Uniform": "`torch.nn.init.uniform_(tensor, -scale, scale)`",
    "initializer": "a function of `torch.nn.init`, which fills a tensor in place",
    **each(
        "Constant=constant_ Dirac=dirac_ HeNormal=kaiming_normal_ HeUniform=kaiming_uniform_ "
        "Identity=eye_ One=ones_ Orthogonal=orthogonal_ Sparse=sparse_ "
        "TruncatedNormal=trunc_normal_ XavierNormal=xavier_normal_ XavierUniform=xavier_uniform_ "
        "Zero=zeros_",
        "`torch.nn.init.{}`",
    ),
    "VarianceScaling": Without("torch has no such initializer; `torch.nn.init` has its parts"),
}

ROWS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "nn": _NN,
        "ops": _OPS,
        "dataset": _DATASET,
        "transforms": _TRANSFORMS,
        "initializer": _INITIALIZER,
    }
)
"""What to write for a name, by area and name."""
