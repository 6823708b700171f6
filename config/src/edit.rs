//! [`Document`]: the objects of a configuration, for lookup and update by path.
//!
//! The schema ([`Shape`]) defines the valid keys, so this module does not name any.
//! [`Document::finish`] then checks the updated configuration as a whole, like the contents of a
//! file.

use std::fmt;

use serde_json::{Map, Value, json};

use super::error::nearest;
use super::items::{as_list, as_map, find, has_names, items, names, push, users};
use super::object_path::escaped;
use super::shape::{Kind, Scalar, Shape};
use super::{Config, ConfigError, ObjectPath, schema, to_yaml};

/// A configuration as a tree of objects.
#[derive(Debug)]
pub struct Document {
    root: Value,
    schema: Value,
    by_number: bool,
}

/// A configuration value, with the schema for its place.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// The value if it is set. `None` means that the default applies.
    pub value: Option<&'a Value>,
    /// The schema for this place.
    pub shape: Shape<'a>,
}

/// An error when reading or updating a configuration by path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EditError {
    /// Path of the error, up to the last segment that exists.
    pub place: ObjectPath,
    /// Human-readable error message.
    pub message: String,
    /// Hint for the user, if the fix is not obvious.
    pub hint: Option<String>,
}

impl EditError {
    pub(super) fn new(place: &ObjectPath, message: impl Into<String>) -> Self {
        Self {
            place: place.clone(),
            message: message.into(),
            hint: None,
        }
    }

    fn hint(self, hint: Option<String>) -> Self {
        Self { hint, ..self }
    }
}

impl std::error::Error for EditError {}

impl fmt::Display for EditError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)?;
        match &self.hint {
            Some(hint) => write!(f, " ({hint})"),
            None => Ok(()),
        }
    }
}

pub(super) type Edited<T> = Result<T, EditError>;

impl Document {
    /// Creates a document from a configuration, in the form used by its file.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let schema = schema();
        let root = in_full(config.to_value(), Shape::root(&schema));
        Self {
            root,
            schema,
            by_number: false,
        }
    }

    /// Creates a document from JSON, which may not be a valid configuration.
    pub(super) fn of(json: &Value) -> Self {
        Self {
            root: json.clone(),
            schema: schema(),
            by_number: false,
        }
    }

    /// Returns true if an update used the index of a list item. In another configuration, the same
    /// index may refer to a different item.
    #[must_use]
    pub fn is_by_number(&self) -> bool {
        self.by_number
    }

    /// Finds the value at a path and its shape.
    ///
    /// # Errors
    /// Fails if the path does not exist and the schema does not allow it.
    pub fn at(&self, place: &ObjectPath) -> Edited<Found<'_>> {
        self.find(place).map(|(_, found)| found)
    }

    /// Finds the value at a path and its shape. In the returned path, item indices are replaced by
    /// names if available.
    ///
    /// # Errors
    /// Same as [`Document::at`].
    pub fn find(&self, place: &ObjectPath) -> Edited<(ObjectPath, Found<'_>)> {
        let shape = Shape::root(&self.schema);
        let value = Some(&self.root);
        let mut found = Found { value, shape };
        let mut here = ObjectPath::default();
        for segment in place.segments() {
            let inner = found.inner(segment).map(|inner| (segment.clone(), inner));
            let inner = inner.or_else(|| item(found, segment));
            let (name, inner) =
                inner.ok_or_else(|| lost(&here, found.value, found.shape, segment))?;
            here = here.join(&name);
            found = inner;
        }
        Ok((here, found))
    }

    /// Sets keys of an existing object. A key can also be a path to an existing object below it.
    ///
    /// # Errors
    /// Fails if the object or key does not exist, or if a value has the wrong type.
    pub fn set(&mut self, place: &ObjectPath, pairs: &[(String, String)]) -> Edited<()> {
        if !self.at(place)?.kind().is_structured() {
            return Err(EditError::new(place, "this is a key, not an object"));
        }
        self.assign(place, pairs, false)
    }

    /// Creates an object with these keys. If the path is a list, we append a new item. For items
    /// without names, the index in the path is where to insert the new item.
    ///
    /// # Errors
    /// Fails if the object exists already, if its parent does not exist, or if a key or value is
    /// invalid.
    pub fn create(&mut self, place: &ObjectPath, pairs: &[(String, String)]) -> Edited<()> {
        let Some((above, _)) = place.split_last() else {
            return Err(EditError::new(place, "it exists already"));
        };
        let found = self.at(place);
        if let Ok(found) = found
            && let Kind::List(_) = found.shape.kind()
        {
            let count = items(found.value).len();
            return self.create(&place.join(&count.to_string()), pairs);
        }
        let above = self.at(&above)?;
        let has_order = matches!(above.shape.kind(), Kind::List(item) if !has_names(item));
        match found {
            Ok(found) if !found.kind().is_structured() => {
                let hint = Some("use `set` to set it".to_owned());
                return Err(EditError::new(place, "this is a key").hint(hint));
            }
            Ok(found) if found.value.is_some() && !has_order => {
                return Err(EditError::new(place, "it exists already"));
            }
            _ => {}
        }
        if has_order {
            self.insert(place)?;
        }
        self.assign(place, pairs, true)
    }

    /// Deletes an object, or resets a key to its default.
    ///
    /// # Errors
    /// Fails if the path does not exist, or if it is a backend used by logical units.
    pub fn delete(&mut self, place: &ObjectPath) -> Edited<()> {
        let Some((above, last)) = place.split_last() else {
            return Err(EditError::new(
                place,
                "the root of the configuration cannot be deleted",
            ));
        };
        if self.at(place)?.value.is_none() {
            return Err(EditError::new(place, "not set"));
        }
        if let [list, name] = place.segments()
            && list == "backends"
        {
            let users = users(&self.root, name);
            // `finish` would reject this too, but its message would be about the LUN instead of the
            // backend.
            if !users.is_empty() {
                return Err(EditError::new(place, in_use(&users)));
            }
        }
        let (value, _) = self.reach(&above, false)?;
        match value {
            // Use `shift_remove` so that the remaining entries keep their order in the file.
            Value::Object(entries) => {
                entries.shift_remove(last);
            }
            Value::Array(items) => {
                let found = find(items, last);
                if let Some((n, by_number)) = found {
                    items.remove(n);
                    self.by_number |= by_number;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Checks the updated document, and returns the configuration and its file.
    ///
    /// # Errors
    /// Fails if the document is no longer a valid configuration.
    pub fn finish(self) -> Edited<(Config, String)> {
        let yaml = to_yaml(&self.root);
        match Config::parse(&yaml, "configuration") {
            Ok(config) => Ok((config, yaml)),
            Err(error) => Err(self.placed(error)),
        }
    }

    fn assign(&mut self, place: &ObjectPath, pairs: &[(String, String)], make: bool) -> Edited<()> {
        // This is needed even without pairs: `create` can create an object with only default
        // values.
        self.reach(place, make)?;
        for (key, text) in pairs {
            let beneath: ObjectPath = key.parse().map_err(|e: String| EditError::new(place, e))?;
            let mut at = place.clone();
            for segment in beneath.segments() {
                at = at.join(segment);
            }
            let (slot, shape) = self.reach(&at, make)?;
            *slot = value(&at, shape, text)?;
        }
        Ok(())
    }

    /// Returns the value at a path. Missing values are created for keys in the schema. If `make` is
    /// set, we also create items of lists and mappings.
    fn reach(&mut self, place: &ObjectPath, make: bool) -> Edited<(&mut Value, Shape<'_>)> {
        let mut shape = Shape::root(&self.schema);
        let mut value = &mut self.root;
        let mut here = ObjectPath::default();
        for segment in place.segments() {
            // We must check the value too: some places accept a scalar or an object, and the short
            // form has no keys.
            let kind = shape.kind_of(Some(&*value));
            let inner = match kind {
                Kind::Object(_) => shape.key(segment),
                Kind::Map(inner) | Kind::List(inner) => Some(inner),
                _ => None,
            };
            let Some(inner) = inner else {
                return Err(lost(&here, Some(&*value), shape, segment));
            };
            value = match kind {
                Kind::List(_) => {
                    let items = as_list(value);
                    let n = match find(items, segment) {
                        Some((n, by_number)) => {
                            self.by_number |= by_number;
                            n
                        }
                        None if make => push(items, inner, segment)
                            .map_err(|message| EditError::new(&here.join(segment), message))?,
                        None => return Err(missing(&here, segment, &names(items))),
                    };
                    &mut items[n]
                }
                kind => {
                    let entries = as_map(value);
                    // The key is in the schema, so we can create it. A name chosen by the user
                    // could be a typo.
                    let is_made = make || matches!(kind, Kind::Object(_));
                    if !is_made && !entries.contains_key(segment) {
                        let keys: Vec<_> = entries.keys().cloned().collect();
                        return Err(missing(&here, segment, &keys));
                    }
                    entries.entry(segment.as_str()).or_insert_with(empty)
                }
            };
            here = here.join(segment);
            shape = inner;
        }
        Ok((value, shape))
    }

    /// Inserts an empty item into a list without names.
    fn insert(&mut self, place: &ObjectPath) -> Edited<()> {
        let Some((above, last)) = place.split_last() else {
            return Ok(());
        };
        let (list, _) = self.reach(&above, true)?;
        let items = as_list(list);
        let count = items.len();
        match last.parse() {
            Ok(n) if n <= count => items.insert(n, empty()),
            _ => {
                let message = format!("invalid position: must be a number from 0 to {count}");
                return Err(EditError::new(place, message));
            }
        }
        // Another client could insert an item first, and then this index would refer to a different
        // item.
        self.by_number = true;
        Ok(())
    }

    /// Adds a path to an error.
    pub(super) fn placed(&self, error: ConfigError) -> EditError {
        let mut place = ObjectPath::default();
        let mut value = Some(&self.root);
        let mut rest = error.path.as_str();
        while !rest.is_empty() {
            let (segment, inner, after) = match value {
                Some(Value::Array(items)) if rest.starts_with('[') => {
                    let (number, after) = rest[1..].split_once(']').unwrap_or((&rest[1..], ""));
                    let n = number.parse().unwrap_or(usize::MAX);
                    // The parser reports item indices, but users know the items by name.
                    let name = names(items).into_iter().nth(n);
                    (
                        name.unwrap_or_else(|| number.to_owned()),
                        items.get(n),
                        after,
                    )
                }
                Some(Value::Object(entries)) => key_of(entries, rest.trim_start_matches('.')),
                _ => (rest.to_owned(), None, ""),
            };
            place = place.join(&segment);
            (value, rest) = (inner, after);
        }
        EditError {
            place,
            message: error.message,
            hint: error.hint,
        }
    }
}

impl<'a> Found<'a> {
    /// Returns the kind of this value: object, list or scalar.
    #[must_use]
    pub fn kind(self) -> Kind<'a> {
        self.shape.kind_of(self.value)
    }

    /// Returns the value for an object key or a mapping name.
    fn inner(self, segment: &str) -> Option<Self> {
        let set = self.value.and_then(|value| value.as_object()?.get(segment));
        let shape = match self.kind() {
            Kind::Object(_) => self.shape.key(segment)?,
            Kind::Map(inner) => {
                set?;
                inner
            }
            _ => return None,
        };
        Some(Self { value: set, shape })
    }

    /// Returns the child objects by name: existing objects in file order, then lists and objects
    /// whose keys have defaults.
    #[must_use]
    pub fn children(self) -> Vec<(String, Found<'a>)> {
        let mut children: Vec<(String, Found<'a>)> = match self.value {
            Some(Value::Object(entries)) => {
                let found = |key: &String| Some((key.clone(), self.inner(key)?));
                entries.keys().filter_map(found).collect()
            }
            Some(Value::Array(items)) => match self.shape.kind() {
                Kind::List(shape) => {
                    let found = |value: &'a Value| Found {
                        value: Some(value),
                        shape,
                    };
                    names(items)
                        .into_iter()
                        .zip(items.iter().map(found))
                        .collect()
                }
                _ => Vec::new(),
            },
            _ => Vec::new(),
        };
        children.retain(|(_, found)| found.kind().is_structured());
        if let Kind::Object(keys) = self.shape.kind() {
            // Keys that are set come first, in file order, followed by objects that exist by
            // default.
            for key in keys.keys() {
                let has = children.iter().any(|(name, _)| name == key);
                match self.inner(key) {
                    Some(found) if !has && found.is_implied() => {
                        children.push((key.clone(), found));
                    }
                    _ => {}
                }
            }
        }
        children
    }

    /// Returns true if the object exists even if it is not set.
    fn is_implied(self) -> bool {
        self.shape.is_structured() && !self.shape.is_optional()
    }

    /// Returns the unset keys of an object with their descriptions.
    #[must_use]
    pub fn unset(self) -> Vec<(String, &'a str)> {
        let Kind::Object(keys) = self.shape.kind() else {
            return Vec::new();
        };
        let found = |key: &'a String| {
            let inner = self.inner(key)?;
            let is_unset = inner.value.is_none();
            let description = inner.shape.description().unwrap_or_default();
            is_unset.then(|| (key.clone(), description))
        };
        keys.keys().filter_map(found).collect()
    }
}

/// Returns an object without keys, which is accepted everywhere until its keys are set.
fn empty() -> Value {
    Value::Object(Map::new())
}

/// Finds a list item by name or index, and returns its name.
fn item<'a>(list: Found<'a>, segment: &str) -> Option<(String, Found<'a>)> {
    let Kind::List(shape) = list.shape.kind() else {
        return None;
    };
    let items = items(list.value);
    let (n, _) = find(items, segment)?;
    let value = Some(&items[n]);
    Some((names(items).swap_remove(n), Found { value, shape }))
}

/// Parses a value from the command line.
fn value(place: &ObjectPath, shape: Shape<'_>, text: &str) -> Edited<Value> {
    let wrong = |expected: &str| {
        Err(EditError::new(
            place,
            format!("expected {expected}, not `{text}`"),
        ))
    };
    let scalar = |scalar: Scalar, text: &str| match scalar {
        Scalar::Bool => text.parse().map(Value::Bool).map_err(|_| "true or false"),
        Scalar::Number => {
            let number = text.parse::<u64>().map(Value::from);
            number.map_err(|_| "a non-negative integer")
        }
        Scalar::Text => Ok(Value::from(text)),
    };
    match shape.kind() {
        Kind::Scalar(kind) => scalar(kind, text).or_else(wrong),
        Kind::Values(kind) => {
            let words = text
                .split(',')
                .map(str::trim)
                .filter(|word| !word.is_empty());
            let values: Result<Vec<_>, _> = words.map(|word| scalar(kind, word)).collect();
            values.map(Value::Array).or_else(wrong)
        }
        Kind::Object(keys) if shape.short_for().is_none() => {
            let keys: Vec<_> = keys.keys().map(String::as_str).collect();
            let hint = Some(format!("its keys are {}", keys.join(", ")));
            Err(EditError::new(place, "this is an object").hint(hint))
        }
        Kind::Map(_) => Err(EditError::new(
            place,
            "this is a mapping of objects: set the keys of an object instead",
        )),
        // A word that is short for an object or a list. Its meaning is checked with the whole
        // document.
        Kind::Object(_) | Kind::List(_) => Ok(in_full(text.into(), shape)),
    }
}

/// Replaces scalars by the objects that they are short for.
fn in_full(value: Value, shape: Shape<'_>) -> Value {
    let kind = shape.kind_of(Some(&value));
    match (value, kind) {
        (Value::Object(entries), kind) => {
            let full = entries.into_iter().map(|(key, value)| {
                let inner = match kind {
                    Kind::Map(inner) => Some(inner),
                    _ => shape.key(&key),
                };
                let value = match inner {
                    Some(inner) => in_full(value, inner),
                    None => value,
                };
                (key, value)
            });
            Value::Object(full.collect())
        }
        (Value::Array(items), Kind::List(inner)) => {
            items.into_iter().map(|item| in_full(item, inner)).collect()
        }
        (Value::String(text), Kind::Object(_)) => match shape.short_for() {
            Some(key) => json!({ key: text }),
            None => Value::String(text),
        },
        (value, _) => value,
    }
}

/// Returns the key at the start of an error path, its value and the remaining path.
fn key_of<'t, 'p>(
    entries: &'t Map<String, Value>,
    path: &'p str,
) -> (String, Option<&'t Value>, &'p str) {
    let ends = |rest: &str| rest.is_empty() || rest.starts_with(['.', '[']);
    let leads = |key: &str| path.strip_prefix(key).filter(|rest| ends(rest));
    let keys = entries.iter().filter(|(key, _)| leads(key).is_some());
    // Names can contain a dot.
    match keys.max_by_key(|(key, _)| key.len()) {
        Some((key, value)) => (key.clone(), Some(value), leads(key).unwrap_or_default()),
        None => (path.to_owned(), None, ""),
    }
}

/// Creates the error for a path that does not exist.
fn lost(here: &ObjectPath, value: Option<&Value>, shape: Shape<'_>, segment: &str) -> EditError {
    match shape.kind_of(value) {
        Kind::Object(keys) => {
            let keys: Vec<&str> = keys.keys().map(String::as_str).collect();
            let hint = match nearest(segment, keys.iter().copied()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("valid keys are {}", keys.join(", ")),
            };
            EditError::new(here, format!("unknown key `{segment}`")).hint(Some(hint))
        }
        Kind::Map(_) => {
            let entries = value.and_then(Value::as_object).into_iter();
            let keys: Vec<String> = entries.flat_map(Map::keys).cloned().collect();
            missing(here, segment, &keys)
        }
        Kind::List(_) => missing(here, segment, &names(items(value))),
        Kind::Values(_) | Kind::Scalar(_) => EditError::new(
            here,
            format!("unknown key `{segment}`: this is a value, not an object"),
        ),
    }
}

/// Maximum number of names listed in a message.
const MAX_LISTED: usize = 16;

/// Returns the error message for an object that is still in use.
fn in_use(users: &[ObjectPath]) -> String {
    let named: Vec<_> = users
        .iter()
        .take(MAX_LISTED)
        .map(ObjectPath::to_string)
        .collect();
    let more = match users.len() - named.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("is in use by {}{more}", named.join(", "))
}

fn missing(here: &ObjectPath, segment: &str, there: &[String]) -> EditError {
    let hint = match nearest(segment, there.iter().map(String::as_str)) {
        Some(near) => Some(format!("did you mean `{}`?", escaped(near))),
        None if there.is_empty() || there.len() > MAX_LISTED => None,
        None => {
            let names: Vec<_> = there.iter().map(|name| escaped(name)).collect();
            Some(format!("valid names are {}", names.join(", ")))
        }
    };
    let message = format!("unknown name `{}`", escaped(segment));
    EditError::new(here, message).hint(hint)
}
