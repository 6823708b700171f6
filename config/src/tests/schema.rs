//! Verifies that the schema matches the parser.

use serde_json::Value;

use crate::*;

/// Returns the keys of a definition with their defaults.
fn defaults(definition: &str) -> Vec<(String, Value)> {
    let schema = schema();
    let keys = &schema["definitions"][definition]["properties"];
    let keys = keys.as_object().expect(definition);
    let given = keys
        .iter()
        .filter_map(|(key, schema)| Some((key.clone(), schema.get("default")?.clone())));
    given.filter(|(_, default)| !default.is_object()).collect()
}

fn config(backend: &str, rest: &str) -> Config {
    let text = format!(
        "backends: {{ d: {{ kind: file, path: /d, size: 1MiB{backend} }} }}\ntargets: []\n{rest}"
    );
    Config::parse(&text, "test.yaml").unwrap_or_else(|e| panic!("{e}\n{text}"))
}

#[test]
fn schema_defaults_match_parser() {
    let host = HostId::new("test");
    let without = config("", "");
    let backend = defaults("Backend");
    assert!(backend.len() > 8, "{backend:?}");
    for (key, default) in backend {
        let with = config(&format!(", {key}: {default}"), "");
        let names = [&without, &with].map(|config| config.backends[0].identity(&host));
        assert_eq!(names[0], names[1], "{key}");
        let mut unnamed = with.clone();
        unnamed.backends[0].names = Names::default();
        assert_eq!(unnamed, without, "{key}: {default}");
    }
    for (section, definition, most) in [
        ("workers", "Workers", 2),
        ("limits", "Limits", 10),
        ("transport", "Transport", 4),
        ("log", "Log", 3),
        ("metrics", "Metrics", 1),
    ] {
        let keys = defaults(definition);
        assert_eq!(keys.len(), most, "{section}: {keys:?}");
        for (key, default) in keys {
            let with = config("", &format!("{section}: {{ {key}: {default} }}\n"));
            assert_eq!(with, without, "{section}.{key}: {default}");
        }
    }
    let faults = |text: &str| config("", &format!("transport: {{ faults: {{ {text} }} }}\n"));
    for (key, default) in defaults("Faults") {
        assert_eq!(faults(&format!("{key}: {default}")), faults(""), "{key}");
    }
    let limits = |text: &str| config(&format!(", limits: {{ {text} }}"), "");
    for (key, default) in defaults("IoLimits") {
        assert_eq!(limits(&format!("{key}: {default}")), limits(""), "{key}");
    }
}

/// Each key and each enum value must have a description that is a full sentence, with a summary
/// that fits on one line.
#[test]
fn keys_have_descriptions() {
    let schema = schema();
    let mut count = 0;
    let root = [("configuration", &schema)];
    let definitions = schema["definitions"].as_object().unwrap();
    let definitions = definitions.iter().map(|(name, node)| (name.as_str(), node));
    for (name, node) in root.into_iter().chain(definitions) {
        for (key, node) in node["properties"].as_object().into_iter().flatten() {
            let text = node["description"].as_str().unwrap_or_default();
            let summary = text.lines().next().unwrap_or_default();
            assert!(summary.len() >= 8, "{name}.{key}: {text:?}");
            let rest = text.strip_prefix(summary).unwrap_or_default();
            assert!(
                rest.is_empty() || rest.starts_with("\n\n"),
                "{name}.{key}: {text:?}"
            );
            count += 1;
        }
        for word in node["oneOf"].as_array().into_iter().flatten() {
            assert!(word["description"].is_string(), "{name}: {word}");
        }
    }
    assert!(count > 70, "{count}");
}
