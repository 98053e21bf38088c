//! `model.safetensors.index.json`: which file holds which tensor (`docs/formats.md` section 7).

use std::{collections::HashMap, fmt, path::Path};

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, IgnoredAny, MapAccess, Visitor},
};

use crate::{Error, container, json};

/// Name of the index.
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

/// A checked index: tensors and the plain names of their files.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Index {
    /// File of each tensor, as a position in `files`.
    pub tensors: HashMap<String, usize>,
    /// File names in the order they are first named; each is a plain name.
    pub files: Vec<String>,
}

/// Parses an index. Only `weight_map` counts: real files have no or wrong total sizes in `metadata`.
pub fn parse_index(bytes: &[u8]) -> Result<Index, Error> {
    let raw: RawIndex = serde_json::from_slice(bytes)
        .map_err(|e| Error::Json { file: INDEX_FILE.to_owned(), message: e.to_string() })?;
    let mut index = Index::default();
    let mut positions = HashMap::new();
    for (tensor, file) in raw.0 {
        if !is_plain_name(&file) {
            return Err(Error::IndexOutside { tensor, file });
        }
        let position = *positions.entry(file).or_insert_with_key(|file: &String| {
            index.files.push(file.clone());
            index.files.len() - 1
        });
        index.tensors.insert(tensor, position);
    }
    Ok(index)
}

/// The index of `dir`, or `None` if it has none.
pub(crate) fn read_index(dir: &Path) -> Result<Option<Index>, Error> {
    match std::fs::symlink_metadata(dir.join(INDEX_FILE)) {
        Ok(_) => parse_index(&container::read_limited(dir, INDEX_FILE, json::INDEX_BYTES_MAX)?).map(Some),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(dir.join(INDEX_FILE))(e)),
    }
}

/// A name of a file directly in the folder on every system: no separator, no `..`, no drive letter.
fn is_plain_name(file: &str) -> bool {
    !file.is_empty() && file != "." && file != ".." && !file.contains(['/', '\\', ':'])
}

struct RawIndex(Vec<(String, String)>);

impl<'de> Deserialize<'de> for RawIndex {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(RawIndexVisitor)
    }
}

struct RawIndexVisitor;

impl<'de> Visitor<'de> for RawIndexVisitor {
    type Value = RawIndex;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<RawIndex, A::Error> {
        let mut weights: Option<WeightMap> = None;
        while let Some(key) = entries.next_key::<String>()? {
            if key != "weight_map" {
                entries.next_value::<IgnoredAny>()?;
            } else if weights.replace(entries.next_value()?).is_some() {
                return Err(A::Error::custom("key \"weight_map\" is repeated"));
            }
        }
        weights.map(|w| RawIndex(w.0)).ok_or_else(|| A::Error::missing_field("weight_map"))
    }
}

struct WeightMap(Vec<(String, String)>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(WeightMapVisitor)
    }
}

struct WeightMapVisitor;

impl<'de> Visitor<'de> for WeightMapVisitor {
    type Value = WeightMap;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from tensor names to file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<WeightMap, A::Error> {
        let mut list = Vec::new();
        let mut seen = std::collections::HashSet::new();
        while let Some((tensor, file)) = entries.next_entry::<String, String>()? {
            if !seen.insert(tensor.clone()) {
                return Err(A::Error::custom(format_args!("key {tensor:?} is repeated")));
            }
            // Names are shown to people, on terminals as well.
            if let Some(name) = [&tensor, &file].into_iter().find(|name| name.contains(char::is_control)) {
                return Err(A::Error::custom(format_args!("name {name:?} has control characters")));
            }
            list.push((tensor, file));
        }
        Ok(WeightMap(list))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_numbered_in_order() {
        let index =
            parse_index(br#"{"metadata":{},"weight_map":{"a":"x.safetensors","b":"y","c":"x.safetensors"}}"#)
                .expect("valid");
        assert_eq!(index.files, ["x.safetensors", "y"]);
        assert_eq!((index.tensors["a"], index.tensors["b"], index.tensors["c"]), (0, 1, 0));
    }

    #[test]
    fn names_outside_the_folder_are_refused() {
        for file in ["", ".", "..", "../x", "/x", "a/b", r"a\b", r"..\x", "C:x"] {
            let text = serde_json::json!({"weight_map": {"t": file}}).to_string();
            let error = parse_index(text.as_bytes()).expect_err(file).to_string();
            assert!(error.contains("index entry for t points outside the model folder"), "{error}");
        }
    }

    #[test]
    fn damaged_indexes_are_refused() {
        for (text, words) in [
            ("", "model.safetensors.index.json"),
            ("[]", "an object with weight_map"),
            ("{}", "weight_map"),
            (r#"{"weight_map":7}"#, "a map from tensor names"),
            (r#"{"weight_map":{"t":1e99}}"#, "a string"),
            (r#"{"weight_map":{"t":"x","t":"x"}}"#, "\"t\" is repeated"),
            (r#"{"weight_map":{"t":"x\u0000"}}"#, r#"name "x\0" has control characters"#),
            (r#"{"weight_map":{"t\n":"x"}}"#, r#"name "t\n" has control characters"#),
            (r#"{"weight_map":{},"weight_map":{}}"#, "\"weight_map\" is repeated"),
        ] {
            let error = parse_index(text.as_bytes()).expect_err(text).to_string();
            assert!(error.contains(words), "{error} lacks {words}");
        }
    }
}
