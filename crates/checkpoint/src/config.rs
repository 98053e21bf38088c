//! `config.json`: the family, and which format the weights are in (`docs/formats.md` sections 1 and 8).

use serde_json::{Map, Value};

use crate::{
    Error, Format, UnsupportedKind,
    formats::{Table, auto_round, compressed_tensors, mlx},
    json,
};

/// Name of the file.
pub(crate) const CONFIG_FILE: &str = "config.json";

/// A `config.json` of the family whose weights are in a supported format.
#[derive(Debug)]
pub struct Config {
    value: Value,
    pub(crate) table: Table,
}

impl Config {
    /// The whole document.
    pub fn value(&self) -> &Value {
        &self.value
    }

    /// The format it describes.
    pub fn format(&self) -> Format {
        self.table.format()
    }
}

/// Parses a `config.json` and refuses what section 8 refuses by config alone. Geometry is not looked at.
pub fn parse_config(bytes: &[u8]) -> Result<Config, Error> {
    let value =
        json::parse(bytes).map_err(|message| Error::Json { file: CONFIG_FILE.to_owned(), message })?;
    let Some(map) = value.as_object() else {
        return Err(field("(the document)", &value, "an object"));
    };
    let root = Fields { map, path: String::new() };
    check_family(&root)?;
    let table = detect(&root)?;
    Ok(Config { value, table })
}

fn check_family(root: &Fields) -> Result<(), Error> {
    let check = |fields: &Fields, key: &'static str, required: bool, accepted: &[&str]| match fields
        .text("model_type")?
    {
        Some(found) if accepted.contains(&found) => Ok(()),
        None if !required => Ok(()),
        found => Err(Error::Family { key, found: found.unwrap_or("(absent)").chars().take(60).collect() }),
    };
    check(root, "model_type", true, &["qwen3_5_moe", "qwen3_5_moe_text"])?;
    let text = root.object("text_config")?;
    if let Some(text) = &text {
        check(text, "text_config.model_type", false, &["qwen3_5_moe_text"])?;
    } else if root.text("model_type")? == Some("qwen3_5_moe") {
        return Err(field("text_config", &Value::Null, "an object"));
    }
    if let Some(vision) = root.object("vision_config")? {
        check(&vision, "vision_config.model_type", false, &["qwen3_5_moe", "qwen3_5_moe_vision"])?;
    }
    Ok(())
}

/// The decision table of section 1.
fn detect(root: &Fields) -> Result<Table, Error> {
    let text = root.object("text_config")?;
    let find = |key: &str| -> Result<Option<Fields>, Error> {
        match (root.object(key)?, &text) {
            (None, Some(text)) => text.object(key),
            (found, _) => Ok(found),
        }
    };
    let (plain, config) = (find("quantization")?, find("quantization_config")?);
    let method = match &config {
        Some(config) => config.text("quant_method")?.map(str::to_owned),
        None => None,
    };
    match (plain, config, method.as_deref()) {
        (None, None, _) => Ok(Table::Bf16),
        (Some(plain), Some(config), None) if plain.map != config.map => Err(Error::TablesDiffer),
        (Some(table), _, _) | (None, Some(table), None) => mlx::Table::parse(&table).map(Table::Mlx),
        (None, Some(table), Some("auto-round")) => auto_round::Table::parse(&table).map(Table::AutoRound),
        (None, Some(table), Some("compressed-tensors")) => {
            compressed_tensors::Table::parse(&table).map(Table::CompressedTensors)
        }
        (None, Some(_), Some(method)) => Err(refuse_method(method)),
    }
}

fn refuse_method(method: &str) -> Error {
    let kind = match method.to_ascii_lowercase().as_str() {
        "modelopt" | "modelopt_fp4" | "nvfp4" => UnsupportedKind::Nvfp4,
        "fp8" | "fbgemm_fp8" => UnsupportedKind::Fp8,
        "mxfp4" | "mxfp8" => UnsupportedKind::Mxfp,
        _ => return Error::QuantMethod(method.chars().take(60).collect()),
    };
    Error::Unsupported { kind, found: format!("quant_method {method:?}") }
}

/// A type error at `key`.
pub(crate) fn field(key: impl Into<String>, found: &Value, expected: &'static str) -> Error {
    let found = if found.is_null() { "absent".to_owned() } else { json::brief(found) };
    Error::Field { file: CONFIG_FILE, key: key.into(), found, expected }
}

/// Typed access to an object of `config.json`; null counts as absent.
pub(crate) struct Fields<'a> {
    pub map: &'a Map<String, Value>,
    /// Dotted path of the object, empty for the document.
    pub path: String,
}

impl<'a> Fields<'a> {
    /// The object `value` at `path`.
    pub(crate) fn new(path: String, value: &'a Value) -> Result<Self, Error> {
        match value.as_object() {
            Some(map) => Ok(Self { map, path }),
            None => Err(field(path, value, "an object")),
        }
    }

    /// Dotted path of a key.
    pub(crate) fn key(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The value at `key`, unless it is null.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| field(self.key(key), value, expected))
    }

    /// A string.
    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, Error> {
        self.typed(key, "a string", Value::as_str)
    }

    /// A non-negative integer.
    pub(crate) fn integer(&self, key: &str) -> Result<Option<u64>, Error> {
        self.typed(key, "a non-negative integer", Value::as_u64)
    }

    /// A non-negative integer that must be there.
    pub(crate) fn required_integer(&self, key: &str) -> Result<u64, Error> {
        self.integer(key)?.ok_or_else(|| field(self.key(key), &Value::Null, "a non-negative integer"))
    }

    /// A truth value.
    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, Error> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// An object.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Self>, Error> {
        let map = self.typed(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Self { map, path: self.key(key) }))
    }

    /// Is there something other than null, `false`, `{}` and `[]`?
    pub(crate) fn is_set(&self, key: &str) -> bool {
        match self.get(key) {
            None | Some(Value::Bool(false)) => false,
            Some(Value::Object(map)) => !map.is_empty(),
            Some(Value::Array(list)) => !list.is_empty(),
            Some(_) => true,
        }
    }

    /// Refuses rotations, sparsity and quantized activations, which several tools spell alike.
    pub(crate) fn refuse_extras(&self) -> Result<(), Error> {
        for key in ["transform_config", "rotation_config"] {
            if self.is_set(key) {
                return Err(Error::Rotated { key });
            }
        }
        let unsupported = |kind, key: &str| Err(Error::Unsupported { kind, found: self.key(key) });
        if self.is_set("sparsity_config") {
            return unsupported(UnsupportedKind::Sparse, "sparsity_config");
        }
        for key in ["kv_cache_scheme", "quantize_activations", "input_activations", "output_activations"] {
            if self.is_set(key) {
                return unsupported(UnsupportedKind::ActivationQuantized, key);
            }
        }
        if self.integer("act_bits")?.is_some_and(|bits| bits < 16) {
            return unsupported(UnsupportedKind::ActivationQuantized, "act_bits");
        }
        Ok(())
    }
}
