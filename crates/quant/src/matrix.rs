//! The canonical matrix: what every checkpoint format becomes without changing a code or a scale.

use crate::{BITS_SUPPORTED, Bytes, Encoding, GROUPS_SUPPORTED, Zero};

/// A linear layer's weight `[rows, cols]` = `[out, in]`, row-major.
///
/// Dense: `codes` holds `rows * cols` floats; `scales` and `biases` are empty. Grouped: each row of `codes`
/// is a little-endian bit stream of `cols` unsigned codes, lowest bits first (formats.md section 4, packing);
/// `scales` holds `rows * cols/group` floats of the scheme's dtype, `biases` the same for [`Zero::Affine`],
/// else nothing.
#[derive(Clone, Debug)]
pub struct Matrix {
    rows: usize,
    cols: usize,
    encoding: Encoding,
    codes: Bytes,
    scales: Bytes,
    biases: Bytes,
}

/// Why bytes do not make a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MatrixError {
    /// No kernel reads this width.
    Bits(u8),
    /// No kernel reads this group length, or `cols` is not a multiple of it.
    Group {
        /// Columns of the matrix.
        cols: usize,
        /// Group length found.
        group: usize,
    },
    /// An array has the wrong size.
    Length {
        /// `codes`, `scales` or `biases`.
        part: &'static str,
        /// Bytes found.
        found: usize,
        /// Bytes the shape asks for.
        expected: usize,
    },
    /// The shape does not fit in memory, or is empty.
    Shape {
        /// Rows given.
        rows: usize,
        /// Columns given.
        cols: usize,
    },
}

impl std::fmt::Display for MatrixError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Bits(bits) => {
                write!(f, "{bits}-bit weights have no kernel; supported: {BITS_SUPPORTED:?} bits")
            }
            Self::Group { cols, group } => write!(
                f,
                "groups of {group} over {cols} columns have no kernel; supported: {GROUPS_SUPPORTED:?}, \
                 dividing the columns"
            ),
            Self::Length { part, found, expected } => {
                write!(f, "{part} hold {found} bytes, {expected} expected")
            }
            Self::Shape { rows, cols } => write!(f, "shape [{rows}, {cols}] is empty or too large"),
        }
    }
}

impl std::error::Error for MatrixError {}

impl Matrix {
    /// A dense matrix over `rows * cols` floats.
    pub fn dense(rows: usize, cols: usize, dtype: crate::Dtype, values: Bytes) -> Result<Self, MatrixError> {
        Self::new(rows, cols, Encoding::Dense(dtype), values, Vec::new().into(), Vec::new().into())
    }

    /// Checks sizes against shape and encoding. Values are not read.
    pub fn new(
        rows: usize,
        cols: usize,
        encoding: Encoding,
        codes: Bytes,
        scales: Bytes,
        biases: Bytes,
    ) -> Result<Self, MatrixError> {
        let shape = MatrixError::Shape { rows, cols };
        let values =
            rows.checked_mul(cols).filter(|&n| n > 0 && n <= isize::MAX as usize / 8).ok_or(shape)?;
        let (code_bytes, scale_bytes, bias_bytes) = match encoding {
            Encoding::Dense(dtype) => (values * dtype.size(), 0, 0),
            Encoding::Grouped(s) => {
                if !BITS_SUPPORTED.contains(&s.bits) {
                    return Err(MatrixError::Bits(s.bits));
                }
                if !GROUPS_SUPPORTED.contains(&s.group) || !cols.is_multiple_of(s.group) {
                    return Err(MatrixError::Group { cols, group: s.group });
                }
                let floats = values / s.group * s.scales.size();
                (values / 8 * s.bits as usize, floats, if s.zero == Zero::Affine { floats } else { 0 })
            }
        };
        for (part, found, expected) in [
            ("codes", codes.len(), code_bytes),
            ("scales", scales.len(), scale_bytes),
            ("biases", biases.len(), bias_bytes),
        ] {
            if found != expected {
                return Err(MatrixError::Length { part, found, expected });
            }
        }
        Ok(Self { rows, cols, encoding, codes, scales, biases })
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// How values are stored.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// All code bytes (dense: the floats).
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// All scales, in the scheme's dtype, `[rows, cols/group]`.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }

    /// All biases, like [`Self::scales`]; empty unless affine.
    pub fn biases(&self) -> &[u8] {
        &self.biases
    }

    /// Code bytes of one row.
    pub fn row_codes(&self, row: usize) -> &[u8] {
        let bytes = self.codes.len() / self.rows;
        &self.codes[row * bytes..(row + 1) * bytes]
    }

    /// Stored bytes: codes, scales and biases.
    pub fn bytes(&self) -> usize {
        self.codes.len() + self.scales.len() + self.biases.len()
    }

    /// The rows `range` as a matrix of its own; shares the bytes.
    ///
    /// # Panics
    /// If the range is empty or outside the matrix.
    pub fn rows_range(&self, range: std::ops::Range<usize>) -> Self {
        assert!(range.start < range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        let cut = |bytes: &Bytes| {
            let row = bytes.len() / self.rows;
            bytes.slice(range.start * row..range.end * row).expect("rows lie inside")
        };
        Self {
            rows: range.len(),
            cols: self.cols,
            encoding: self.encoding,
            codes: cut(&self.codes),
            scales: cut(&self.scales),
            biases: cut(&self.biases),
        }
    }

    /// Tells the owner of the bytes that a device has taken its copy.
    pub fn discard(&self) {
        for bytes in [&self.codes, &self.scales, &self.biases] {
            bytes.discard();
        }
    }
}
