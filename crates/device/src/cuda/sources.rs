//! The kernel files, as text inside the binary.

macro_rules! texts {
    ($($name:literal => $path:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../../../kernels/", $path)))),*]
    };
}

/// Files with kernels, by name.
pub(super) const FILES: &[(&str, &str)] = texts! {
    "rows.cu" => "cuda/rows.cu",
    "rows_prompt.cu" => "cuda/rows_prompt.cu",
    "gated_norm.cu" => "cuda/gated_norm.cu",
    "draw.cu" => "cuda/draw.cu",
    "probe.cu" => "cuda/probe.cu",
    "exact.cu" => "cuda/exact.cu",
    "linear.cu" => "cuda/linear.cu",
    "linear_stream.cu" => "cuda/linear_stream.cu",
    "experts.cu" => "cuda/experts.cu",
    "experts_stream.cu" => "cuda/experts_stream.cu",
    "experts_sort.cu" => "cuda/experts_sort.cu",
    "linear_prompt.cu" => "cuda/linear_prompt.cu",
    "linear_warpgroup.cu" => "cuda/linear_warpgroup.cu",
    "align.cu" => "cuda/align.cu",
    "experts_warpgroup.cu" => "cuda/experts_warpgroup.cu",
    "linear_dense.cu" => "cuda/linear_dense.cu",
    "dense_prompt.cu" => "cuda/dense_prompt.cu",
    "vision_rows.cu" => "cuda/vision_rows.cu",
    "vision_attention.cu" => "cuda/vision_attention.cu",
    "experts_prompt.cu" => "cuda/experts_prompt.cu",
    "embed.cu" => "cuda/embed.cu",
    "conv.cu" => "cuda/conv.cu",
    "conv_prompt.cu" => "cuda/conv_prompt.cu",
    "delta_rule.cu" => "cuda/delta_rule.cu",
    "delta_step.cu" => "cuda/delta_step.cu",
    "delta_scan.cu" => "cuda/delta_scan.cu",
    "state.cu" => "cuda/state.cu",
    "rope.cu" => "cuda/rope.cu",
    "kv.cu" => "cuda/kv.cu",
    "kv_pages.cu" => "cuda/kv_pages.cu",
    "attention.cu" => "cuda/attention.cu",
    "attention_few.cu" => "cuda/attention_few.cu",
    "attention_prompt.cu" => "cuda/attention_prompt.cu",
    "attention_warpgroup.cu" => "cuda/attention_warpgroup.cu",
    "attention_halves.cu" => "cuda/attention_halves.cu",
    "route.cu" => "cuda/route.cu",
};

/// Files that others include, by the name they are included with.
pub(super) const HEADERS: &[(&str, &str)] = texts! {
    "common.cuh" => "cuda/common.cuh",
    "step.cuh" => "cuda/step.cuh",
    "quantize.cuh" => "cuda/quantize.cuh",
    "quads.cuh" => "cuda/quads.cuh",
    "divide.cuh" => "cuda/divide.cuh",
    "slices.cuh" => "cuda/slices.cuh",
    "linear.cuh" => "cuda/linear.cuh",
    "linear_few.cuh" => "cuda/linear_few.cuh",
    "linear_decode.cuh" => "cuda/linear_decode.cuh",
    "linear_stream.cuh" => "cuda/linear_stream.cuh",
    "linear_prompt.cuh" => "cuda/linear_prompt.cuh",
    "aligned.cuh" => "cuda/aligned.cuh",
    "ring.cuh" => "cuda/ring.cuh",
    "linear_warpgroup.cuh" => "cuda/linear_warpgroup.cuh",
    "warpgroup.cuh" => "cuda/warpgroup.cuh",
    "delta_rule.cuh" => "cuda/delta_rule.cuh",
    "conv.cuh" => "cuda/conv.cuh",
    "states.cuh" => "cuda/states.cuh",
    "kv.cuh" => "cuda/kv.cuh",
    "attention.cuh" => "cuda/attention.cuh",
    "attention_span.cuh" => "cuda/attention_span.cuh",
    "attention_room.cuh" => "cuda/attention_room.cuh",
    "route.cuh" => "cuda/route.cuh",
    "shared/math.h" => "shared/math.h",
    "shared/philox.h" => "shared/philox.h",
    "shared/quantize.h" => "shared/quantize.h",
};

/// Whether a text, or a header that it includes, has this word.
pub(super) fn mentions(text: &str, word: &str) -> bool {
    fn included(line: &str) -> Option<&str> {
        line.strip_prefix("#include \"")?.split('"').next()
    }
    let header = |name: &str| HEADERS.iter().find(|(of, _)| *of == name).map(|(_, text)| *text);
    text.contains(word)
        || text.lines().filter_map(included).filter_map(header).any(|header| mentions(header, word))
}

/// Files with the constants they are checked with when no card is there.
pub(super) const VARIANTS: &[(&str, &[(&str, &str)])] = &[
    ("rows.cu", &[]),
    ("rows_prompt.cu", &[]),
    ("gated_norm.cu", &[]),
    ("delta_step.cu", &[]),
    ("draw.cu", &[]),
    ("probe.cu", &[]),
    ("exact.cu", &[]),
    // Kinds (linear.cuh): 16452 is 4-bit affine bf16 in groups of 64; 32788 4-bit symmetric f16, 128.
    (
        "linear.cu",
        &[
            ("ROWS", "1"),
            ("WHOLE_SLICES", "0"),
            ("COLS", "2048"),
            ("THREADS", "256"),
            ("TILES", "1"),
            ("STREAM", "1"),
            ("BLOCKS", "4"),
            ("KINDS", "1"),
            ("KIND0", "16452"),
        ],
    ),
    (
        "linear.cu",
        &[
            ("ROWS", "8"),
            ("WHOLE_SLICES", "0"),
            ("COLS", "4096"),
            ("THREADS", "512"),
            ("TILES", "1"),
            ("KINDS", "2"),
            ("KIND0", "16452"),
            ("KIND1", "16456"),
        ],
    ),
    (
        "linear.cu",
        &[
            ("ROWS", "32"),
            ("WHOLE_SLICES", "1"),
            ("COLS", "2048"),
            ("THREADS", "256"),
            ("TILES", "1"),
            ("KINDS", "2"),
            ("KIND0", "0"),
            ("KIND1", "32788"),
        ],
    ),
    (
        "linear.cu",
        &[
            ("ROWS", "16"),
            ("WHOLE_SLICES", "1"),
            ("COLS", "512"),
            ("THREADS", "128"),
            ("TILES", "4"),
            ("KINDS", "3"),
            ("KIND0", "8294"),
            ("KIND1", "16453"),
            ("KIND2", "16450"),
        ],
    ),
    (
        "linear_stream.cu",
        &[
            ("ROWS", "32"),
            ("COLS", "2048"),
            ("WARPS", "16"),
            ("RING", "2"),
            ("PARTS", "1"),
            ("UNIT_BYTES", "8"),
            ("CODE_GROUP", "64"),
            ("KINDS", "1"),
            ("KIND0", "16452"),
        ],
    ),
    (
        "linear_stream.cu",
        &[
            ("ROWS", "16"),
            ("COLS", "4096"),
            ("WARPS", "8"),
            ("RING", "2"),
            ("PARTS", "2"),
            ("UNIT_BYTES", "16"),
            ("CODE_GROUP", "64"),
            ("KINDS", "2"),
            ("KIND0", "16452"),
            ("KIND1", "16456"),
        ],
    ),
    (
        "linear_prompt.cu",
        &[("TILE_ROWS", "128"), ("ROW_WARPS", "2"), ("BLOCKS", "1"), ("KINDS", "1"), ("KIND0", "16452")],
    ),
    (
        "linear_prompt.cu",
        &[("TILE_ROWS", "64"), ("ROW_WARPS", "2"), ("BLOCKS", "1"), ("KINDS", "1"), ("KIND0", "16456")],
    ),
    (
        "linear_prompt.cu",
        &[("TILE_ROWS", "64"), ("ROW_WARPS", "2"), ("BLOCKS", "1"), ("KINDS", "1"), ("KIND0", "32788")],
    ),
    ("vision_rows.cu", &[]),
    ("kv_pages.cu", &[]),
    ("attention.cu", &[("GROUPS", "4"), ("DIGITS", "1"), ("ROWS", "1")]),
    ("attention_few.cu", &[("GROUPS", "4"), ("DIGITS", "1"), ("PARTS", "8")]),
    ("attention_few.cu", &[("GROUPS", "4"), ("DIGITS", "1"), ("PARTS", "4")]),
    ("attention.cu", &[("GROUPS", "4"), ("DIGITS", "1"), ("ROWS", "4")]),
    ("attention_prompt.cu", &[("GROUPS", "4"), ("DIGITS", "1"), ("WARPS", "8"), ("STAGES", "2")]),
    ("attention_warpgroup.cu", &[("GROUPS", "4"), ("DIGITS", "1"), ("HALVES", "0")]),
    ("attention_warpgroup.cu", &[("GROUPS", "4"), ("DIGITS", "1"), ("HALVES", "1")]),
    ("attention_halves.cu", &[("GROUPS", "4"), ("DIGITS", "1")]),
    // Forms of cards with less shared memory.
    ("attention.cu", &[("GROUPS", "4"), ("DIGITS", "1"), ("ROWS", "2")]),
    ("attention_prompt.cu", &[("GROUPS", "4"), ("DIGITS", "2"), ("WARPS", "4"), ("STAGES", "1")]),
    ("conv.cu", &[("CONV_TAPS", "4")]),
    ("conv_prompt.cu", &[("CONV_TAPS", "4"), ("DELTA_STEPS", "8"), ("DELTA_KEY_DIM", "128")]),
    ("delta_rule.cu", &[("DELTA_STEPS", "8"), ("DELTA_KEY_DIM", "128")]),
    ("delta_rule.cu", &[("DELTA_STEPS", "8"), ("DELTA_KEY_DIM", "128"), ("ONE_ROW_WINDOWS", "1")]),
    ("delta_scan.cu", &[("DELTA_STEPS", "8"), ("DELTA_KEY_DIM", "128")]),
    ("route.cu", &[("ROUTE_VALUES", "8")]),
    ("rope.cu", &[]),
    ("kv.cu", &[]),
    ("state.cu", &[]),
    ("experts_sort.cu", &[("KINDS", "0")]),
    // Heads of 72: a group of 64 and one of 8.
    ("vision_attention.cu", &[("GROUPS", "2"), ("DIGITS", "2"), ("LAST", "8"), ("BLOCKS", "2")]),
    ("vision_attention.cu", &[("GROUPS", "1"), ("DIGITS", "2"), ("LAST", "64"), ("BLOCKS", "2")]),
    ("dense_prompt.cu", &[("DENSE_DTYPE", "0"), ("STAGE_SLABS", "16"), ("STAGES", "2")]),
    ("dense_prompt.cu", &[("DENSE_DTYPE", "1"), ("STAGE_SLABS", "4"), ("STAGES", "2")]),
    ("linear_warpgroup.cu", &[("STAGES", "7"), ("KINDS", "1"), ("KIND0", "16452")]),
    ("linear_warpgroup.cu", &[("STAGES", "7"), ("KINDS", "1"), ("KIND0", "32788")]),
    ("linear_warpgroup.cu", &[("STAGES", "7"), ("KINDS", "1"), ("KIND0", "16456")]),
    ("align.cu", &[]),
    ("experts_warpgroup.cu", &[("STAGES", "7"), ("INNER", "512"), ("KINDS", "1"), ("KIND0", "16452")]),
    ("linear_dense.cu", &[("DENSE_DTYPE", "0"), ("KINDS", "1"), ("KIND0", "0")]),
    (
        "experts.cu",
        &[
            ("ROWS", "1"),
            ("ROUTE_VALUES", "8"),
            ("EXPERT_WIDTH", "2048"),
            ("EXPERT_INNER", "512"),
            ("THREADS", "256"),
            ("TILES", "1"),
            ("KINDS", "1"),
            ("KIND0", "16452"),
        ],
    ),
    (
        "experts.cu",
        &[
            ("ROWS", "4"),
            ("EXPERT_WIDTH", "2048"),
            ("EXPERT_INNER", "512"),
            ("THREADS", "256"),
            ("TILES", "1"),
            ("KINDS", "2"),
            ("KIND0", "0"),
            ("KIND1", "16451"),
        ],
    ),
    (
        "experts_stream.cu",
        &[
            ("ROWS", "8"),
            ("EXPERT_WIDTH", "2048"),
            ("EXPERT_INNER", "512"),
            ("RING", "3"),
            ("STAGED", "1"),
            ("HELD", "0"),
            ("ROUTE_VALUES", "8"),
            ("KINDS", "1"),
            ("KIND0", "16452"),
        ],
    ),
    (
        "experts_stream.cu",
        &[
            ("ROWS", "8"),
            ("EXPERT_WIDTH", "3072"),
            ("EXPERT_INNER", "1280"),
            ("RING", "2"),
            ("STAGED", "0"),
            ("HELD", "12"),
            ("ROUTE_VALUES", "0"),
            ("KINDS", "1"),
            ("KIND0", "32806"),
        ],
    ),
    (
        "experts_prompt.cu",
        &[
            ("INNER_GROUP", "64"),
            ("TILE_ROWS", "64"),
            ("ROW_WARPS", "2"),
            ("BLOCKS", "2"),
            ("KINDS", "1"),
            ("KIND0", "16452"),
        ],
    ),
    ("embed.cu", &[("KINDS", "1"), ("KIND0", "16452")]),
    // Cards whose matrix instruction does not sum exactly.
    (
        "linear.cu",
        &[
            ("ROWS", "8"),
            ("WHOLE_SLICES", "0"),
            ("COLS", "2048"),
            ("THREADS", "256"),
            ("TILES", "1"),
            ("KINDS", "1"),
            ("KIND0", "16452"),
            (PLAIN_SUMS, "1"),
        ],
    ),
    (
        "experts_prompt.cu",
        &[
            ("INNER_GROUP", "64"),
            ("TILE_ROWS", "64"),
            ("ROW_WARPS", "2"),
            ("BLOCKS", "2"),
            ("KINDS", "1"),
            ("KIND0", "16452"),
            (PLAIN_SUMS, "1"),
        ],
    ),
];

/// Set where grouped products are to be summed without the half-precision matrix instruction.
pub(super) const PLAIN_SUMS: &str = "PLAIN_SUMS";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_in_headers_of_headers() {
        let text = |of| FILES.iter().find(|(name, _)| *name == of).expect("a file").1;
        for of in ["linear.cu", "experts.cu", "linear_prompt.cu", "experts_stream.cu"] {
            assert!(mentions(text(of), PLAIN_SUMS), "{of}");
        }
        assert!(!mentions(text("rows.cu"), PLAIN_SUMS) && !mentions(text("attention.cu"), PLAIN_SUMS));
    }

    #[test]
    fn every_file_is_checked_in_some_variant() {
        for (file, _) in FILES {
            assert!(
                VARIANTS.iter().any(|(of, _)| of == file),
                "{file} is compiled by nobody before it is used"
            );
        }
    }
}
