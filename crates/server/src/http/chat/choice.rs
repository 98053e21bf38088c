//! `tool_choice`: which functions the model may or must call.

use serde_json::{Map, Value};
use text::Tool;

use super::super::error::{ApiError, Code};
use super::super::fields::{Fields, unexpected};

/// What `tool_choice` asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// No calls; the model is not told of the functions.
    None,
    /// The model decides.
    #[default]
    Auto,
    /// Some call must be made.
    Required,
    /// This function must be called.
    Named(String),
    /// Only these functions; the flag says whether one must be called.
    Allowed(Vec<String>, bool),
}

impl ToolChoice {
    /// The functions the model is told of.
    pub(crate) fn offered(&self, tools: Vec<Tool>) -> Vec<Tool> {
        match self {
            Self::None => Vec::new(),
            Self::Auto | Self::Required | Self::Named(_) => tools,
            Self::Allowed(names, _) => tools.into_iter().filter(|tool| names.contains(&tool.name)).collect(),
        }
    }

    /// The functions of which one must be called, if one must.
    pub(crate) fn forced(&self, tools: &[Tool]) -> Option<Vec<Tool>> {
        match self {
            Self::None | Self::Auto | Self::Allowed(_, false) => None,
            Self::Required => Some(tools.to_vec()),
            Self::Named(name) => Some(tools.iter().filter(|tool| tool.name == *name).cloned().collect()),
            Self::Allowed(names, true) => {
                Some(tools.iter().filter(|tool| names.contains(&tool.name)).cloned().collect())
            }
        }
    }
}

const PATH: &str = "tool_choice";
const KNOWN: &str = "none, auto, required, a function or allowed_tools";

/// Reads the field; every function it names must be among the tools.
pub(crate) fn read(fields: &mut Fields, tools: &[Tool]) -> Result<ToolChoice, ApiError> {
    let choice = match fields.take(PATH) {
        None => return Ok(ToolChoice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "none" => ToolChoice::None,
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            _ => return Err(unexpected(PATH, KNOWN, &Value::String(word))),
        },
        Some(Value::Object(object)) => object_choice(object)?,
        Some(other) => return Err(unexpected(PATH, KNOWN, &other)),
    };
    let unknown = |name: &&String| !tools.iter().any(|tool| tool.name == **name);
    let missing = match &choice {
        ToolChoice::Named(name) => Some(name).filter(unknown),
        ToolChoice::Allowed(names, _) => names.iter().find(unknown),
        _ => None,
    };
    if missing.is_some() {
        return Err(ApiError::invalid(PATH, "names a function that is not among the tools"));
    }
    if choice == ToolChoice::Required && tools.is_empty() {
        return Err(ApiError::invalid(PATH, "required needs tools"));
    }
    Ok(choice)
}

fn object_choice(object: Map<String, Value>) -> Result<ToolChoice, ApiError> {
    match object.get("type").and_then(Value::as_str) {
        Some("function" | "custom") => function_name(&object, PATH).map(ToolChoice::Named),
        Some("allowed_tools") => {
            // The list stands in an object of its own, or beside `type` as in Responses.
            let inner = object.get("allowed_tools").and_then(Value::as_object).unwrap_or(&object);
            let mode = inner.get("mode").and_then(Value::as_str);
            let is_required = match mode {
                Some("auto") => false,
                Some("required") => true,
                _ => return Err(ApiError::invalid(format!("{PATH}.mode"), "must be auto or required")),
            };
            let tools = inner.get("tools").and_then(Value::as_array);
            let path = format!("{PATH}.tools");
            let tools = tools.ok_or_else(|| ApiError::at(Code::MissingField, &path, "an array is needed"))?;
            let name = |(index, tool): (usize, &Value)| {
                let path = format!("{path}[{index}]");
                let object = tool.as_object().ok_or_else(|| unexpected(&path, "an object", tool))?;
                function_name(object, &path)
            };
            Ok(ToolChoice::Allowed(
                tools.iter().enumerate().map(name).collect::<Result<_, _>>()?,
                is_required,
            ))
        }
        _ => Err(ApiError::invalid(format!("{PATH}.type"), "must be function or allowed_tools")),
    }
}

/// The name in `{"function": {"name"}}`, or in `{"name"}` as in Responses.
fn function_name(object: &Map<String, Value>, path: &str) -> Result<String, ApiError> {
    let name =
        object.get("function").and_then(|function| function.get("name")).or_else(|| object.get("name"));
    let path = format!("{path}.function.name");
    let name = name
        .and_then(Value::as_str)
        .ok_or_else(|| ApiError::at(Code::MissingField, path, "the name of a function is needed"))?;
    Ok(name.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(choice: Value) -> Result<ToolChoice, ApiError> {
        let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
        let tools = Tool::parse_all(&json!([tool("f"), tool("g")])).unwrap();
        let Value::Object(map) = json!({"tool_choice": choice}) else { panic!("an object") };
        read(&mut Fields::new(map), &tools)
    }

    #[test]
    fn forms_of_the_field() {
        assert_eq!(check(json!(null)).unwrap(), ToolChoice::Auto);
        assert_eq!(check(json!("none")).unwrap(), ToolChoice::None);
        let named = check(json!({"type": "function", "function": {"name": "g"}})).unwrap();
        assert_eq!(named, ToolChoice::Named("g".into()));
        let allowed = json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools":
            [{"type": "function", "function": {"name": "f"}}]}});
        let allowed = check(allowed).unwrap();
        assert_eq!(allowed, ToolChoice::Allowed(vec!["f".into()], false));
        for bad in [
            json!("all"),
            json!(1),
            json!({"type": "function", "function": {"name": "h"}}),
            json!({"type": "function"}),
            json!({"type": "x"}),
            json!({"type": "allowed_tools", "mode": "some", "tools": []}),
            json!({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "h"}]}),
        ] {
            assert!(check(bad.clone()).unwrap_err().param.unwrap().starts_with(PATH), "{bad}");
        }
    }
}
