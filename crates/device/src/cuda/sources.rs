//! The kernel files, as text inside the binary.

macro_rules! texts {
    ($($name:literal => $path:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../../../kernels/", $path)))),*]
    };
}

/// Files with kernels, by name.
pub(super) const FILES: &[(&str, &str)] = texts! {
    "rows.cu" => "cuda/rows.cu",
    "draw.cu" => "cuda/draw.cu",
    "linear.cu" => "cuda/linear.cu",
    "experts.cu" => "cuda/experts.cu",
    "linear_prompt.cu" => "cuda/linear_prompt.cu",
    "linear_dense.cu" => "cuda/linear_dense.cu",
    "experts_prompt.cu" => "cuda/experts_prompt.cu",
    "embed.cu" => "cuda/embed.cu",
    "conv.cu" => "cuda/conv.cu",
    "delta_rule.cu" => "cuda/delta_rule.cu",
    "state.cu" => "cuda/state.cu",
    "rope.cu" => "cuda/rope.cu",
    "kv.cu" => "cuda/kv.cu",
    "attention.cu" => "cuda/attention.cu",
    "route.cu" => "cuda/route.cu",
};

/// Files that others include, by the name they are included with.
pub(super) const HEADERS: &[(&str, &str)] = texts! {
    "common.cuh" => "cuda/common.cuh",
    "step.cuh" => "cuda/step.cuh",
    "quantize.cuh" => "cuda/quantize.cuh",
    "linear.cuh" => "cuda/linear.cuh",
    "linear_decode.cuh" => "cuda/linear_decode.cuh",
    "linear_prompt.cuh" => "cuda/linear_prompt.cuh",
    "states.cuh" => "cuda/states.cuh",
    "kv.cuh" => "cuda/kv.cuh",
    "attention.cuh" => "cuda/attention.cuh",
    "route.cuh" => "cuda/route.cuh",
    "../shared/math.h" => "shared/math.h",
    "../shared/philox.h" => "shared/philox.h",
    "../shared/quantize.h" => "shared/quantize.h",
};

/// Files with the constants they are checked with when no card is there.
pub(super) const VARIANTS: &[(&str, &[(&str, &str)])] = &[("rows.cu", &[]), ("draw.cu", &[])];
