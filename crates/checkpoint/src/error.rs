//! What can be wrong with a model folder, and how to say it (`docs/formats.md` section 8).

use std::{fmt, io, path::PathBuf};

/// Problems named in one message; the rest is counted.
pub const PROBLEMS_SHOWN: usize = 5;

/// Why a checkpoint is refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused a file or folder.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A name that should be a file is something else.
    #[error("{} is not a regular file", .0.display())]
    NotAFile(PathBuf),
    /// The folder has no `config.json`.
    #[error("{} holds no config.json: not a model folder", .0.display())]
    NoConfig(PathBuf),
    /// The folder has no weights.
    #[error(
        "{} holds neither model.safetensors.index.json nor model.safetensors: not a model folder, \
         or an incomplete download", .0.display()
    )]
    NoWeights(PathBuf),
    /// A JSON file is larger than any real one.
    #[error("{file} has {} bytes; at most {} are read", grouped(*bytes), grouped(*limit))]
    TooLarge {
        /// File name.
        file: String,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// Not JSON, or a repeated key.
    #[error("{file}: {message}")]
    Json {
        /// File name.
        file: String,
        /// What the parser says, with line and column.
        message: String,
    },
    /// A value of a JSON file has the wrong type or range.
    #[error("{file}: {key} is {found}; {expected} is expected")]
    Field {
        /// File name.
        file: &'static str,
        /// Dotted path of the key.
        key: String,
        /// The value found, shortened.
        found: String,
        /// What is accepted.
        expected: &'static str,
    },
    /// Another model family.
    #[error("{key} {found:?} is not supported: this engine reads qwen3_5_moe")]
    Family {
        /// Dotted path of the `model_type` key.
        key: &'static str,
        /// The value found.
        found: String,
    },
    /// A kind of checkpoint no kernel reads.
    #[error("{kind} checkpoints are not supported (found {found})")]
    Unsupported {
        /// The kind.
        kind: UnsupportedKind,
        /// What gave it away: a config value or a tensor.
        found: String,
    },
    /// Weights multiplied by a rotation.
    #[error("rotated weights ({key}) are not supported")]
    Rotated {
        /// The config key that says so.
        key: &'static str,
    },
    /// `quantization` and `quantization_config` differ.
    #[error(
        "config.json: quantization and quantization_config differ: keep the one the weights were written with"
    )]
    TablesDiffer,
    /// An MLX mode other than affine.
    #[error("MLX mode {0:?} is not supported: only affine is")]
    MlxMode(String),
    /// A quantization method of another tool.
    #[error("quant_method {0:?} is not supported: MLX affine, auto-round and compressed-tensors are")]
    QuantMethod(String),
    /// An AutoRound packing other than GPTQ's.
    #[error("AutoRound packing {0:?} is not supported: re-export as auto_round:auto_gptq with sym")]
    Packing(String),
    /// An AutoRound data type other than int.
    #[error("AutoRound data_type {0:?} is not supported: int is")]
    DataType(String),
    /// A compressed-tensors format other than pack-quantized.
    #[error("compressed-tensors format {0:?} is not supported: pack-quantized is")]
    CompressedFormat(String),
    /// A compressed-tensors strategy other than group.
    #[error("config group {group:?}: strategy {strategy:?} is not supported: group is")]
    Strategy {
        /// Name of the config group.
        group: String,
        /// The strategy found.
        strategy: String,
    },
    /// Something is wrong with the container of a safetensors file.
    #[error("{file}: {problem}")]
    Header {
        /// File name.
        file: String,
        /// What is wrong.
        problem: HeaderProblem,
    },
    /// An index entry that is not a plain file name.
    #[error("index entry for {tensor} points outside the model folder: {file:?}")]
    IndexOutside {
        /// Tensor name in the index.
        tensor: String,
        /// The file named.
        file: String,
    },
    /// A mapped file does not exist.
    #[error("{index} names {file}, which is not in the folder (incomplete download?)")]
    MissingShard {
        /// The index file.
        index: &'static str,
        /// The file named.
        file: String,
    },
    /// The index and a header disagree.
    #[error("the index says that {tensor} is in {file}, whose header does not name it")]
    NotInFile {
        /// Tensor name.
        tensor: String,
        /// The file named.
        file: String,
    },
    /// One tensor stored twice, possibly under two spellings.
    #[error("tensor {tensor} is in both {first} and {second}")]
    Duplicate {
        /// Tensor name.
        tensor: String,
        /// File (and spelling, where it differs).
        first: String,
        /// File (and spelling, where it differs).
        second: String,
    },
    /// Several MTP sidecars and no rule to choose.
    #[error(
        "several MTP files beside the index ({}): keep one, or name it mtp-4bit.safetensors",
        files.join(", ")
    )]
    Sidecars {
        /// Their names.
        files: Vec<String>,
    },
    /// Layers disagree about the axis order of `conv1d.weight`, which decides the norm convention.
    #[error("{first} is in Hugging Face order and {second} in MLX order: the norm convention is ambiguous")]
    MixedConv {
        /// A tensor of shape `[C, 1, K]`.
        first: String,
        /// A tensor of shape `[C, K, 1]`.
        second: String,
    },
    /// Tensors or modules with the same kind of problem.
    #[error("{}", list(.shown, *.total))]
    Tensors {
        /// The first few, at most [`PROBLEMS_SHOWN`].
        shown: Vec<Problem>,
        /// How many there are.
        total: usize,
    },
    /// A folder to write to is not empty.
    #[error("{} is not empty: name a new or empty folder", .0.display())]
    NotEmpty(PathBuf),
}

/// Kinds of checkpoints that are recognised and refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnsupportedKind {
    /// NVIDIA's 4-bit floats.
    Nvfp4,
    /// 8-bit floats.
    Fp8,
    /// Microscaling floats.
    Mxfp,
    /// Sparse weights.
    Sparse,
    /// Quantized activations or a quantized key/value cache.
    ActivationQuantized,
}

impl fmt::Display for UnsupportedKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nvfp4 => "NVFP4",
            Self::Fp8 => "FP8",
            Self::Mxfp => "MXFP",
            Self::Sparse => "sparse",
            Self::ActivationQuantized => "activation-quantized",
        })
    }
}

/// What is wrong with a safetensors container (`docs/formats.md` section 7).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderProblem {
    /// A placeholder of Git LFS.
    #[error("a Git LFS pointer, not the weights (fetch the file with git lfs pull)")]
    Pointer,
    /// Fewer than 8 bytes.
    #[error("truncated: {0} bytes are too short for a safetensors file")]
    Short(u64),
    /// The first 8 bytes are no plausible length.
    #[error("not a safetensors file (header length {0})")]
    Length(u64),
    /// The file ends early.
    #[error("truncated: header needs {} bytes, the file has {}", grouped(*.needs), grouped(*.has))]
    Truncated {
        /// Bytes the header asks for.
        needs: u64,
        /// Bytes of the file.
        has: u64,
    },
    /// The file goes on after its last tensor.
    #[error("{} unknown bytes after the last tensor", grouped(*.0))]
    Trailing(u64),
    /// The header is not the JSON it should be, or a key is repeated.
    #[error("header: {0}")]
    Json(String),
    /// A dtype no tool writes.
    #[error("{tensor}: dtype {dtype:?} is unknown")]
    Dtype {
        /// Tensor name.
        tensor: String,
        /// The dtype found.
        dtype: String,
    },
    /// Offsets that do not fit the shape.
    #[error("{tensor}: bytes {begin}..{end} do not fit shape {shape:?} of {dtype}")]
    Offsets {
        /// Tensor name.
        tensor: String,
        /// First byte.
        begin: u64,
        /// Byte after the last.
        end: u64,
        /// Shape in the header.
        shape: Vec<u64>,
        /// Dtype in the header.
        dtype: &'static str,
    },
    /// Two tensors share bytes.
    #[error("{first} and {second} overlap")]
    Overlap {
        /// The one that starts first.
        first: String,
        /// The other.
        second: String,
    },
}

/// What is wrong with one tensor or module. Names are spelled as the files spell them where they are there.
///
/// The order of the variants is the order in which kinds are reported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// An activation-ordered module.
    #[error("{module}: activation-ordered weights (g_idx) are not supported")]
    ActOrder {
        /// Module path or config group.
        module: String,
    },
    /// Zero points away from the middle.
    #[error("{module}: asymmetric weights are not supported")]
    Asymmetric {
        /// Module path or config group.
        module: String,
    },
    /// Packed by a tool that config.json does not name.
    #[error("{module}: packed as {found}, but config.json describes {format}")]
    Foreign {
        /// Module path.
        module: String,
        /// Format of the packed tensors.
        found: crate::Format,
        /// Format of the checkpoint.
        format: crate::Format,
    },
    /// Stored twice in different forms.
    #[error("{module}: both {first} and {second} are present")]
    Both {
        /// Module path.
        module: String,
        /// One form.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// Part of a packed module is missing.
    #[error("{module}: weight is packed but {lacks} is missing")]
    Incomplete {
        /// Module path.
        module: String,
        /// The missing part.
        lacks: &'static str,
    },
    /// A tensor is missing.
    #[error("missing tensor {tensor} (needed by {needed_by})")]
    Missing {
        /// Canonical name.
        tensor: String,
        /// The part of the model that reads it.
        needed_by: String,
    },
    /// One of several experts is missing.
    #[error("{needed_by}: expert {expert} of {experts} has no {projection}")]
    MissingExpert {
        /// The layer.
        needed_by: String,
        /// Index of the expert.
        expert: usize,
        /// How many there should be.
        experts: usize,
        /// `gate_proj`, `up_proj` or `down_proj`.
        projection: &'static str,
    },
    /// A dtype that cannot be there.
    #[error("{tensor}: dtype {found} found, {expected} expected")]
    Dtype {
        /// Tensor name.
        tensor: String,
        /// Its dtype.
        found: &'static str,
        /// What is accepted.
        expected: &'static str,
    },
    /// A shape that does not follow from config.json.
    #[error("{tensor}: shape {found:?} found, {expected} expected from config.json")]
    Shape {
        /// Tensor name.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape or relation that is accepted.
        expected: String,
    },
    /// A width without a kernel.
    #[error("{module}: {bits}-bit {format} weights are not supported ({accepted})")]
    Bits {
        /// Module path.
        module: String,
        /// Width found.
        bits: u64,
        /// Who packed it.
        format: crate::Format,
        /// Widths accepted.
        accepted: &'static str,
    },
    /// A group length without a kernel.
    #[error("{module}: {format} group size {group} is not supported (32, 64 or 128)")]
    Group {
        /// Module path.
        module: String,
        /// Group length found.
        group: u64,
        /// Who packed it.
        format: crate::Format,
    },
    /// config.json and tensors disagree.
    #[error("{module}: config says {config}; the tensors hold {tensors}")]
    Table {
        /// Module path.
        module: String,
        /// What the table says.
        config: String,
        /// What the shapes say.
        tensors: String,
    },
    /// One module has several entries in the table of config.json, and they differ.
    #[error("{module}: config.json has different entries for two spellings of this module")]
    Spellings {
        /// Module path.
        module: String,
    },
    /// `weight_shape` contradicts the packed tensor.
    #[error("{module}: weight_shape holds {found:?}, {expected:?} expected")]
    WeightShape {
        /// Module path.
        module: String,
        /// The two numbers found.
        found: [i64; 2],
        /// Output and input features.
        expected: [usize; 2],
    },
    /// NaN or an infinity.
    #[error("{module}: {part} at {at:?} is not finite")]
    NonFinite {
        /// Module or tensor.
        module: String,
        /// `scale`, `bias` or `value`.
        part: &'static str,
        /// Row and group, or the index in the tensor.
        at: Vec<usize>,
    },
    /// Bytes that were there when the file was opened cannot be read.
    #[error(
        "{file}: {bytes} bytes at {at} cannot be read any more ({detail}): the file has changed, or its disk \
         fails; complete or replace the file and load again"
    )]
    Read {
        /// File name.
        file: String,
        /// First byte.
        at: usize,
        /// How many.
        bytes: usize,
        /// What the system says.
        detail: String,
    },
}

impl From<Problem> for Error {
    fn from(problem: Problem) -> Self {
        Self::Tensors { shown: vec![problem], total: 1 }
    }
}

impl Error {
    /// The problems of the first kind among `problems`; `None` if there are none.
    pub(crate) fn first_kind(problems: Vec<Problem>) -> Option<Self> {
        let first = problems.iter().map(Problem::rank).min()?;
        let same: Vec<Problem> = problems.into_iter().filter(|p| p.rank() == first).collect();
        let total = same.len();
        Some(Self::Tensors { shown: same.into_iter().take(PROBLEMS_SHOWN).collect(), total })
    }

    /// Wraps a system error with the path it is about.
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}

impl Problem {
    fn rank(&self) -> u8 {
        match self {
            Self::ActOrder { .. } => 0,
            Self::Asymmetric { .. } => 1,
            Self::Foreign { .. } => 2,
            Self::Both { .. } => 3,
            Self::Incomplete { .. } => 4,
            Self::Missing { .. } => 5,
            Self::MissingExpert { .. } => 6,
            Self::Dtype { .. } => 7,
            Self::Shape { .. } => 8,
            Self::Bits { .. } => 9,
            Self::Group { .. } => 10,
            Self::Table { .. } => 11,
            Self::Spellings { .. } => 12,
            Self::WeightShape { .. } => 13,
            Self::NonFinite { .. } => 14,
            Self::Read { .. } => 15,
        }
    }
}

fn list(shown: &[Problem], total: usize) -> String {
    let mut text = shown.iter().map(Problem::to_string).collect::<Vec<_>>().join("; ");
    if total > shown.len() {
        text += &format!("; and {} more", total - shown.len());
    }
    text
}

/// `1234567` as `1,234,567`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_of_one_kind_come_together_with_a_count() {
        let missing = |i: usize| Problem::Missing { tensor: format!("t{i}"), needed_by: "layer 3".into() };
        let mut problems: Vec<_> = (0..7).map(missing).collect();
        problems.push(Problem::Shape { tensor: "s".into(), found: vec![1], expected: "[2]".into() });
        let text = Error::first_kind(problems).expect("there are some").to_string();
        assert!(text.starts_with("missing tensor t0 (needed by layer 3); "), "{text}");
        assert!(text.ends_with("t4 (needed by layer 3); and 2 more"), "{text}");
        assert!(Error::first_kind(vec![]).is_none());
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!([grouped(0), grouped(999), grouped(1_204_224)], ["0", "999", "1,204,224"]);
    }
}
