//! Launches as data: which kernel, how many blocks, with which arguments.

use std::ffi::c_void;

use super::memory::StepAddresses;

/// An entry of a kernel file, compiled with constants of its own. Equal kernels share one compilation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Kernel {
    /// A file of `kernels/cuda`, for example `norm.cu`.
    pub(super) file: &'static str,
    /// The `extern "C"` name.
    pub(super) name: &'static str,
    /// Preprocessor constants of this variant; the file is compiled once for each distinct set.
    pub(super) defines: Vec<(&'static str, String)>,
}

impl Kernel {
    /// An entry of a file without constants.
    pub(super) fn new(file: &'static str, name: &'static str) -> Self {
        Self { file, name, defines: Vec::new() }
    }

    /// Adds a constant.
    pub(super) fn define(mut self, name: &'static str, value: impl ToString) -> Self {
        self.defines.push((name, value.to_string()));
        self
    }
}

/// One launch of a list.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    pub(super) kernel: Kernel,
    /// Blocks.
    pub(super) grid: [u32; 3],
    /// Threads of a block.
    pub(super) block: u32,
    /// Bytes of dynamic shared memory.
    pub(super) shared: u32,
    pub(super) args: Args,
}

/// Kernel arguments in order: each lies at an address of its own, aligned to 8 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Args {
    words: Vec<u64>,
    starts: Vec<usize>,
}

impl Args {
    pub(super) fn new() -> Self {
        Self::default()
    }

    fn word(mut self, word: u64) -> Self {
        self.starts.push(self.words.len());
        self.words.push(word);
        self
    }

    /// A pointer parameter.
    pub(super) fn ptr(self, address: u64) -> Self {
        self.word(address)
    }

    /// A `uint` parameter.
    pub(super) fn u32(self, value: u32) -> Self {
        self.word(value as u64)
    }

    /// A `uint` parameter from a size.
    ///
    /// # Panics
    /// If it does not fit; sizes of rows and widths do.
    pub(super) fn size(self, value: usize) -> Self {
        self.u32(u32::try_from(value).expect("a size below 2^32"))
    }

    /// A `ulong` parameter.
    pub(super) fn u64(self, value: u64) -> Self {
        self.word(value)
    }

    /// A `float` parameter.
    pub(super) fn f32(self, value: f32) -> Self {
        self.word(value.to_bits() as u64)
    }

    /// A struct parameter made of whole 8-byte words.
    pub(super) fn words(mut self, words: &[u64]) -> Self {
        self.starts.push(self.words.len());
        self.words.extend_from_slice(words);
        self
    }

    /// The `StepTables` parameter (kernels/cuda/step.cuh).
    pub(super) fn step(self, step: &StepAddresses) -> Self {
        self.words(&step.words())
    }

    /// Pointers to the values, as the driver takes them.
    pub(super) fn pointers(&self) -> Vec<*mut c_void> {
        self.starts.iter().map(|&at| (&raw const self.words[at]).cast_mut().cast::<c_void>()).collect()
    }
}
