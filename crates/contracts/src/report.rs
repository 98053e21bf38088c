//! What was checked and what was found.

use std::fmt;

use crate::RowBits;

/// A promise (`docs/api.md` section 1; the last one is `docs/formats.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Contract {
    /// E1: drafted equals plain.
    Drafted,
    /// E2: concurrent equals alone.
    Concurrent,
    /// E3: resumed equals fresh.
    Resumed,
    /// E5: scored equals decoded.
    Scored,
    /// E6: seeded equals seeded.
    Seeded,
    /// E7: windows and trees equal steps.
    Windows,
    /// E8: chunked equals whole.
    Chunked,
    /// E9: same bits on every device.
    Devices,
    /// The same codes in another format or width give the same bits.
    Formats,
}

impl Contract {
    /// Its id in `docs/api.md`; `formats` has none.
    pub const fn id(self) -> &'static str {
        match self {
            Self::Drafted => "E1",
            Self::Concurrent => "E2",
            Self::Resumed => "E3",
            Self::Scored => "E5",
            Self::Seeded => "E6",
            Self::Windows => "E7",
            Self::Chunked => "E8",
            Self::Devices => "E9",
            Self::Formats => "formats",
        }
    }

    /// The promise in words.
    pub const fn promise(self) -> &'static str {
        match self {
            Self::Drafted => "drafted equals plain",
            Self::Concurrent => "concurrent equals alone",
            Self::Resumed => "resumed equals fresh",
            Self::Scored => "scored equals decoded",
            Self::Seeded => "seeded equals seeded",
            Self::Windows => "windows and trees equal steps",
            Self::Chunked => "chunked equals whole",
            Self::Devices => "same bits on every device",
            Self::Formats => "same codes, same bits",
        }
    }
}

/// One contract over one subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The promise.
    pub contract: Contract,
    /// How it was put to the test.
    pub case: &'static str,
    /// Comparisons made: rows of logits, states, pages, tokens.
    pub compared: usize,
    /// The first difference, in words; `None` if there was none.
    pub difference: Option<String>,
}

impl Outcome {
    /// Whether the promise held. One that nothing was compared for did not.
    pub fn held(&self) -> bool {
        self.difference.is_none() && self.compared > 0
    }
}

/// Collects comparisons of one contract.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    compared: usize,
    difference: Option<String>,
}

impl Tally {
    /// Compares two values; `what` names them if they differ.
    pub fn same<T: PartialEq>(&mut self, found: &T, expected: &T, what: impl FnOnce() -> String) {
        self.compared += 1;
        if found != expected && self.difference.is_none() {
            self.difference = Some(what());
        }
    }

    /// Compares rows of logits, the first being row `first` of its sequence. Rows that are not finite are a
    /// difference too: they would equal each other whatever came before.
    pub fn rows(&mut self, found: &[RowBits], expected: &[RowBits], first: usize, what: impl Fn() -> String) {
        self.same(&found.len(), &expected.len(), || {
            format!("{}: {} rows, {} expected", what(), found.len(), expected.len())
        });
        for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
            self.same(found, expected, || format!("{}: logits of row {} differ", what(), first + at));
            self.same(&found.finite, &true, || {
                format!("{}: logits of row {} are not finite", what(), first + at)
            });
        }
    }

    /// The outcome.
    pub fn outcome(self, contract: Contract, case: &'static str) -> Outcome {
        Outcome { contract, case, compared: self.compared, difference: self.difference }
    }
}

/// All contracts over one subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Name of the subject.
    pub subject: String,
    /// One row per contract.
    pub outcomes: Vec<Outcome>,
}

impl Report {
    /// Whether every promise held.
    pub fn held(&self) -> bool {
        self.outcomes.iter().all(Outcome::held)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.subject)?;
        for Outcome { contract, case, compared, difference } in &self.outcomes {
            let verdict = match difference {
                Some(difference) => difference,
                None if *compared == 0 => "nothing to compare",
                None => "equal",
            };
            writeln!(
                f,
                "  {:8}{:30} {case:36} {compared:7} compared  {verdict}",
                contract.id(),
                contract.promise()
            )?;
        }
        Ok(())
    }
}
