//! [`Shape`]: the [schema](super::schema()) for a path in a configuration.

use serde_json::{Map, Value};

/// The schema for a path in a configuration.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'s> {
    /// The whole schema, used to resolve references.
    root: &'s Value,
    /// The schema for this path.
    node: &'s Value,
}

/// Value kinds.
#[derive(Clone, Copy, Debug)]
pub enum Kind<'s> {
    /// An object with these keys.
    Object(&'s Map<String, Value>),
    /// Objects by user-defined names.
    Map(Shape<'s>),
    /// An ordered list of objects.
    List(Shape<'s>),
    /// An ordered list of scalars.
    Values(Scalar),
    /// A single scalar, such as a number or a string.
    Scalar(Scalar),
}

/// Scalar kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scalar {
    /// A boolean: `true` or `false`.
    Bool,
    /// A non-negative integer.
    Number,
    /// Any other value. Its syntax is checked with the whole configuration.
    Text,
}

impl Kind<'_> {
    /// Returns true if this is an object or can contain objects.
    #[must_use]
    pub fn is_structured(self) -> bool {
        matches!(self, Self::Object(_) | Self::Map(_) | Self::List(_))
    }
}

impl<'s> Shape<'s> {
    /// Returns the shape for a whole configuration.
    #[must_use]
    pub fn root(schema: &'s Value) -> Self {
        Self {
            root: schema,
            node: schema,
        }
    }

    fn of(self, node: &'s Value) -> Self {
        Self { node, ..self }
    }

    /// Returns the expected kind.
    #[must_use]
    pub fn kind(self) -> Kind<'s> {
        let ways = self.ways();
        for way in &ways {
            if let Some(properties) = way["properties"].as_object() {
                return Kind::Object(properties);
            }
            if way["additionalProperties"].is_object() {
                return Kind::Map(self.of(&way["additionalProperties"]));
            }
            if let Some(items) = way.get("items") {
                let items = self.of(items);
                return match items.kind() {
                    Kind::Scalar(scalar) => Kind::Values(scalar),
                    _ => Kind::List(items),
                };
            }
        }
        Kind::Scalar(scalar(&ways))
    }

    /// Returns the kind for the given value: some places support a list of scalars as well as
    /// objects by name.
    #[must_use]
    pub fn kind_of(self, value: Option<&Value>) -> Kind<'s> {
        let kind = self.kind();
        let (Kind::Values(_), Some(Value::Object(_))) = (kind, value) else {
            return kind;
        };
        let ways = self.ways();
        let mut maps = ways.iter().map(|way| &way["additionalProperties"]);
        let inner = maps.find(|inner| inner.is_object());
        inner.map_or(kind, |inner| Kind::Map(self.of(inner)))
    }

    /// Returns the shape for an object key.
    #[must_use]
    pub fn key(self, name: &str) -> Option<Self> {
        match self.kind() {
            Kind::Object(keys) => keys.get(name).map(|node| self.of(node)),
            _ => None,
        }
    }

    /// Returns true if this is an object or can contain objects.
    #[must_use]
    pub fn is_structured(self) -> bool {
        self.kind().is_structured()
    }

    /// Returns true if an unset value is different from an empty object or list.
    #[must_use]
    pub fn is_optional(self) -> bool {
        let is_null = |way: &&Value| types(way).any(|name| name == "null");
        self.alternatives().iter().any(is_null)
    }

    /// Returns the key set by a scalar that is used instead of an object, if this is supported.
    #[must_use]
    pub fn short_for(self) -> Option<&'s str> {
        let ways = self.ways();
        let mut objects = ways.iter().copied();
        let object = objects.find(|way| way["properties"].is_object())?;
        let mut required = object["required"].as_array()?.iter();
        let (Some(Value::String(key)), None) = (required.next(), required.next()) else {
            return None;
        };
        let is_scalar = |way: &&Value| types(way).any(|name| name == "string");
        ways.iter().any(is_scalar).then_some(key)
    }

    /// Returns the summary of this key.
    #[must_use]
    pub fn description(self) -> Option<&'s str> {
        let own = self.node["description"].as_str();
        let text = own.or_else(|| {
            self.ways()
                .iter()
                .find_map(|way| way["description"].as_str())
        });
        text?.lines().next()
    }

    /// Returns the alternative schemas, except for null.
    fn ways(self) -> Vec<&'s Value> {
        let mut ways = self.alternatives();
        ways.retain(|way| way["type"] != "null");
        ways
    }

    fn alternatives(self) -> Vec<&'s Value> {
        if let Some(name) = self.node["$ref"].as_str() {
            let found = self.root.pointer(name.trim_start_matches('#'));
            return found.map_or_else(Vec::new, |node| self.of(node).alternatives());
        }
        let lists = ["allOf", "anyOf", "oneOf"].iter();
        let mut lists = lists.filter_map(|key| self.node[*key].as_array());
        match lists.next() {
            Some(list) => list
                .iter()
                .flat_map(|n| self.of(n).alternatives())
                .collect(),
            None => vec![self.node],
        }
    }
}

/// Returns the types in a schema.
fn types(way: &Value) -> impl Iterator<Item = &str> {
    let one = way["type"].as_str();
    let many = way["type"].as_array().into_iter().flatten();
    one.into_iter().chain(many.filter_map(Value::as_str))
}

/// Returns the scalar kind shared by all of these schemas.
fn scalar(ways: &[&Value]) -> Scalar {
    let is = |wanted: &str| {
        let mut ways = ways.iter();
        ways.all(|way| {
            let mut names = types(way).filter(|name| *name != "null");
            names.next() == Some(wanted) && names.next().is_none()
        })
    };
    match () {
        () if is("boolean") => Scalar::Bool,
        () if is("integer") => Scalar::Number,
        () => Scalar::Text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema;

    fn kind_of(keys: &[&str]) -> String {
        let schema = schema();
        let mut shape = Shape::root(&schema);
        for key in keys {
            shape = match shape.kind() {
                Kind::Map(inner) | Kind::List(inner) => inner,
                _ => shape.key(key).unwrap(),
            };
        }
        match shape.kind() {
            Kind::Object(_) => "object".to_owned(),
            Kind::Map(_) => "map".to_owned(),
            Kind::List(_) => "list".to_owned(),
            Kind::Values(scalar) => format!("{scalar:?}s"),
            Kind::Scalar(scalar) => format!("{scalar:?}"),
        }
    }

    #[test]
    fn shapes_match_schema() {
        for (keys, kind) in [
            (&["identity"] as &[&str], "Text"),
            (&["strict"], "Bool"),
            (&["backends"], "map"),
            (&["backends", "*"], "object"),
            (&["backends", "*", "kind"], "Text"),
            (&["backends", "*", "size"], "Text"),
            (&["backends", "*", "create"], "Bool"),
            (&["backends", "*", "block_size"], "Number"),
            (&["backends", "*", "write_cache"], "Text"),
            (&["targets"], "list"),
            (&["targets", "*", "portals"], "list"),
            (&["targets", "*", "portals", "*", "ioc_guid"], "Text"),
            (&["targets", "*", "portals", "*", "redirect"], "object"),
            (&["targets", "*", "luns"], "map"),
            (&["targets", "*", "luns", "*"], "object"),
            (&["targets", "*", "luns", "*", "read_only"], "Bool"),
            (&["targets", "*", "access"], "list"),
            (&["targets", "*", "access", "*", "luns"], "Numbers"),
            (&["targets", "*", "chap", "users", "*", "secret"], "Text"),
            (&["discovery_chap", "mutual"], "object"),
            (&["workers", "count"], "Text"),
            (&["workers", "cpus"], "Numbers"),
            (&["limits", "max_sessions"], "Number"),
            (&["transport", "faults", "loss"], "Text"),
            (&["metrics", "remote"], "Bool"),
            (&["log", "format"], "Text"),
        ] {
            assert_eq!(kind_of(keys), kind, "{keys:?}");
        }
    }

    #[test]
    fn rule_luns_are_list_or_mapping() {
        let schema = schema();
        let mut shape = Shape::root(&schema);
        for key in ["targets", "", "access", "", "luns"] {
            shape = match shape.kind() {
                Kind::List(inner) => inner,
                _ => shape.key(key).unwrap(),
            };
        }
        for value in [None, Some(&Value::Array(Vec::new()))] {
            assert!(matches!(shape.kind_of(value), Kind::Values(Scalar::Number)));
        }
        let Kind::Map(lun) = shape.kind_of(Some(&Value::Object(Map::new()))) else {
            panic!("no units by number");
        };
        assert_eq!(lun.short_for(), Some("backend"));
    }

    #[test]
    fn logical_unit_can_be_name() {
        let schema = schema();
        let target = match Shape::root(&schema).key("targets").unwrap().kind() {
            Kind::List(target) => target,
            other => panic!("{other:?}"),
        };
        let Kind::Map(lun) = target.key("luns").unwrap().kind() else {
            panic!("no logical units");
        };
        assert_eq!(lun.short_for(), Some("backend"));
        assert_eq!(target.short_for(), None);
        assert!(target.key("chap").unwrap().is_optional());
        assert!(!target.key("access").unwrap().is_optional());
        assert!(target.key("iqn").unwrap().description().is_some());
    }
}
