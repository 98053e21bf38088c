//! Facts about a folder that do not stop it from loading but should be said.

/// Names given in one warning; the rest is counted.
const NAMES_SHOWN: usize = 5;

/// Something unusual that was found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Warning {
    /// Tensors of a mapped file that the index does not name: not read.
    #[error("{file} holds {} the index does not name: {}", count(*.total), shown.join(", "))]
    NotIndexed {
        /// File name.
        file: String,
        /// The first few names.
        shown: Vec<String>,
        /// How many there are.
        total: usize,
    },
    /// Tensors nobody asked for.
    #[error("not used: {} ({})", count(*.total), shown.join(", "))]
    Unused {
        /// The first few names, as stored.
        shown: Vec<String>,
        /// How many there are.
        total: usize,
    },
    /// A sidecar takes the place of MTP tensors in the main files.
    #[error("{sidecar} is used in place of {} under mtp in the main files", count(*.tensors))]
    MtpReplaced {
        /// File name.
        sidecar: String,
        /// How many tensors are ignored.
        tensors: usize,
    },
    /// A pattern of `extra_config` that this engine's regular expressions cannot read.
    #[error("extra_config pattern {0:?} cannot be read: modules it describes are not compared with it")]
    Pattern(String),
}

impl Warning {
    /// A file with tensors beside the index; `names` are sorted.
    pub(crate) fn not_indexed(file: String, names: Vec<String>) -> Self {
        let total = names.len();
        Self::NotIndexed { file, shown: names.into_iter().take(NAMES_SHOWN).collect(), total }
    }

    /// Tensors nobody asked for; `names` are sorted.
    pub(crate) fn unused(names: Vec<String>) -> Self {
        let total = names.len();
        Self::Unused { shown: names.into_iter().take(NAMES_SHOWN).collect(), total }
    }
}

fn count(total: usize) -> String {
    format!("{total} tensor{}", if total == 1 { "" } else { "s" })
}
