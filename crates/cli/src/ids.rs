//! A file of token ids.

use std::path::Path;

use serde_json::Value;

use crate::error::{Failure, Result};
use crate::input;

/// Largest file of ids, bytes.
const IDS_BYTES_MAX: u64 = 64 << 20;

/// Reads a JSON array of token ids below `vocabulary`; `-` is stdin.
pub(crate) fn read(path: &Path, vocabulary: usize) -> Result<Vec<u32>> {
    let name = if path == Path::new("-") { "stdin".to_owned() } else { path.display().to_string() };
    let bytes = input::file_or_stdin(path, IDS_BYTES_MAX)?;
    parse(&bytes, vocabulary).map_err(|problem| {
        Failure::usage(format!("{name}: {problem}"))
            .hint(format!("a JSON array of token ids below {vocabulary} is expected, such as [1, 2, 3]"))
    })
}

fn parse(bytes: &[u8], vocabulary: usize) -> std::result::Result<Vec<u32>, String> {
    let list = match serde_json::from_slice(bytes) {
        Ok(Value::Array(list)) => list,
        Ok(other) => return Err(format!("an array is expected, found {}", kind(&other))),
        Err(error) => return Err(error.to_string()),
    };
    if list.is_empty() {
        return Err("the array is empty; at least one token id is needed".to_owned());
    }
    let id = |(at, value): (usize, &Value)| match value.as_u64() {
        Some(id) if id < vocabulary as u64 => Ok(id as u32),
        Some(id) => Err(format!("[{at}]: token {id} is not below the vocabulary of {vocabulary}")),
        None if value.is_number() => Err(format!("[{at}]: {value} is no token id")),
        None => Err(format!("[{at}]: {} is no token id", kind(value))),
    };
    list.iter().enumerate().map(id).collect()
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_have_a_position() {
        let check = |text: &str, wanted: std::result::Result<Vec<u32>, &str>| match (
            parse(text.as_bytes(), 10),
            wanted,
        ) {
            (Ok(found), Ok(wanted)) => assert_eq!(found, wanted, "{text}"),
            (Err(found), Err(wanted)) => assert!(found.contains(wanted), "{text}: {found}"),
            (found, wanted) => panic!("{text}: {found:?} instead of {wanted:?}"),
        };
        check("[0, 9]", Ok(vec![0, 9]));
        check("[]", Err("empty"));
        check("[1, 10]", Err("[1]: token 10 is not below the vocabulary of 10"));
        check("[1, -1]", Err("[1]: -1 is no token id"));
        check("[1.0]", Err("[0]: 1.0 is no token id"));
        check("[99999999999999999999]", Err("is no token id"));
        check("[[1]]", Err("[0]: an array is no token id"));
        check("{\"ids\": [1]}", Err("an array is expected, found an object"));
        check("[1,", Err("line 1 column 3"));
        check("", Err("EOF"));
    }
}
