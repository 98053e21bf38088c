//! Unquantized modules: one float tensor.

use quant::Encoding;

use crate::{
    Problem,
    folder::Tensor,
    locate::{Layout, Module, Part},
};

/// The dtypes accepted, for messages.
pub(crate) const FLOATS: &str = "BF16, F16 or F32";

/// The float dtype of `tensor`, or why it cannot be read.
pub(crate) fn float(tensor: &Tensor) -> Result<quant::Dtype, Problem> {
    tensor.dtype.float().ok_or_else(|| Problem::Dtype {
        tensor: tensor.stored.to_string(),
        found: tensor.dtype.name(),
        expected: FLOATS,
    })
}

/// A matrix `[rows, cols]`.
pub(crate) fn locate(tensor: &Tensor, rows: usize, cols: usize) -> Result<Module, Problem> {
    let encoding = Encoding::Dense(float(tensor)?);
    tensor.expect_shape(&[rows, cols])?;
    Ok(module(tensor, rows, cols, encoding, tensor.part()))
}

/// The vision tower's patch embedding as a matrix `[out, channels * time * height * width]`.
pub(crate) fn locate_patch_embed(tensor: &Tensor, rows: usize, cols: usize) -> Result<Module, Problem> {
    let encoding = Encoding::Dense(float(tensor)?);
    let inner = tensor.shape.iter().skip(1).try_fold(1usize, |n, &d| n.checked_mul(d));
    if tensor.shape.len() != 5 || tensor.shape[0] != rows || inner != Some(cols) {
        return Err(tensor.shape_problem(format!("[{rows}, ...] of {cols} values each")));
    }
    let mut found = module(tensor, rows, cols, encoding, tensor.part());
    if tensor.is_channels_last() {
        found.layout = Layout::ChannelsLast { channels: tensor.shape[4] };
    }
    Ok(found)
}

/// Rows `first..first + rows` of every expert of `[experts, stacked_rows, cols]`.
pub(crate) fn locate_stacked(
    tensor: &Tensor,
    shape: [usize; 3],
    first: usize,
    rows: usize,
) -> Result<Vec<Module>, Problem> {
    let dtype = float(tensor)?;
    tensor.expect_shape(&shape)?;
    let [experts, stacked_rows, cols] = shape;
    let row_bytes = cols * dtype.size();
    let cut = |expert: usize| {
        let start = tensor.range.start + (expert * stacked_rows + first) * row_bytes;
        let part = Part { file: tensor.file, range: start..start + rows * row_bytes };
        Module { expert: Some(expert), ..module(tensor, rows, cols, Encoding::Dense(dtype), part) }
    };
    Ok((0..experts).map(cut).collect())
}

fn module(tensor: &Tensor, rows: usize, cols: usize, encoding: Encoding, codes: Part) -> Module {
    let name = tensor.stored.strip_suffix(".weight").unwrap_or(&tensor.stored).to_owned();
    Module {
        name,
        expert: None,
        rows,
        cols,
        encoding,
        codes,
        scales: None,
        biases: None,
        layout: Layout::Rows,
    }
}
