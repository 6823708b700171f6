//! [`Document`]: the objects of a configuration by their paths, to be looked at and changed.
//!
//! What may stand where is the schema's to say ([`Shape`]), so no key is named here. What a change
//! makes of the configuration as a whole is checked as a file is, by [`Document::finish`].

use std::fmt;

use serde_json::{Map, Value, json};

use super::error::nearest;
use super::items::{as_list, as_map, find, has_names, items, names, push, users};
use super::object_path::escaped;
use super::shape::{Kind, Scalar, Shape};
use super::{Config, ConfigError, ObjectPath, schema, to_yaml};

/// A configuration as objects in objects.
#[derive(Debug)]
pub struct Document {
    root: Value,
    schema: Value,
    by_number: bool,
}

/// A value of a configuration with what the schema allows in its place.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// The value, as it is set; nothing where the default holds.
    pub value: Option<&'a Value>,
    /// The part of the schema that is about this place.
    pub shape: Shape<'a>,
}

/// A mistake in looking at a configuration or changing it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EditError {
    /// Path of the mistake, as far as it leads somewhere.
    pub place: ObjectPath,
    /// The mistake, for people.
    pub message: String,
    /// Advice, where it is not plain what to do.
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
    /// The document of a configuration, as its file would have it.
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

    /// Objects as JSON has them, which may be no configuration.
    pub(super) fn of(json: &Value) -> Self {
        Self {
            root: json.clone(),
            schema: schema(),
            by_number: false,
        }
    }

    /// Returns true if a change went to an item by its number in a list: in another configuration
    /// that may be another item.
    #[must_use]
    pub fn is_by_number(&self) -> bool {
        self.by_number
    }

    /// Finds the value at a path, and its shape.
    ///
    /// # Errors
    /// Nothing does, and nothing may.
    pub fn at(&self, place: &ObjectPath) -> Edited<Found<'_>> {
        self.find(place).map(|(_, found)| found)
    }

    /// Finds the value at a path, and its shape; and the path with the names of items where it has
    /// their numbers.
    ///
    /// # Errors
    /// As [`Document::at`].
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

    /// Sets keys of an object that is there. A key may be a path to something beneath that is
    /// there.
    ///
    /// # Errors
    /// There is no such object or key, or a value is of another kind.
    pub fn set(&mut self, place: &ObjectPath, pairs: &[(String, String)]) -> Edited<()> {
        if !self.at(place)?.kind().is_structured() {
            return Err(EditError::new(place, "this is a key, which has no keys"));
        }
        self.assign(place, pairs, false)
    }

    /// Makes an object with these keys. A list's own path means a further item at its end; the
    /// number of an item without a name is where the new one goes.
    ///
    /// # Errors
    /// It is there already, there is nothing to make it in, or a key or value is wrong.
    pub fn create(&mut self, place: &ObjectPath, pairs: &[(String, String)]) -> Edited<()> {
        let Some((above, _)) = place.split_last() else {
            return Err(EditError::new(place, "it is there already"));
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
                let hint = Some("`set` sets it".to_owned());
                return Err(EditError::new(place, "this is a key").hint(hint));
            }
            Ok(found) if found.value.is_some() && !has_order => {
                return Err(EditError::new(place, "it is there already"));
            }
            _ => {}
        }
        if has_order {
            self.insert(place)?;
        }
        self.assign(place, pairs, true)
    }

    /// Takes away an object, or what a key is set to.
    ///
    /// # Errors
    /// It is not there, or it is a backend that logical units use.
    pub fn delete(&mut self, place: &ObjectPath) -> Edited<()> {
        let Some((above, last)) = place.split_last() else {
            return Err(EditError::new(
                place,
                "a configuration cannot be without it",
            ));
        };
        if self.at(place)?.value.is_none() {
            return Err(EditError::new(place, "it is not set"));
        }
        if let [list, name] = place.segments()
            && list == "backends"
        {
            let users = users(&self.root, name);
            // Checked here although `finish` would refuse it as well: its message would be about
            // the LUN, not the backend.
            if !users.is_empty() {
                return Err(EditError::new(place, in_use(&users)));
            }
        }
        let (value, _) = self.reach(&above, false)?;
        match value {
            // The others keep their order, which the file shows.
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

    /// Checks the changed document; returns the configuration and its file.
    ///
    /// # Errors
    /// It is no configuration any more.
    pub fn finish(self) -> Edited<(Config, String)> {
        let yaml = to_yaml(&self.root);
        match Config::parse(&yaml, "configuration") {
            Ok(config) => Ok((config, yaml)),
            Err(error) => Err(self.placed(error)),
        }
    }

    fn assign(&mut self, place: &ObjectPath, pairs: &[(String, String)], make: bool) -> Edited<()> {
        // Also without any pair: `create` makes an object that is all defaults.
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

    /// The value at a path, which is made where the schema's keys lead there; `make` makes items
    /// of lists and mappings too.
    fn reach(&mut self, place: &ObjectPath, make: bool) -> Edited<(&mut Value, Shape<'_>)> {
        let mut shape = Shape::root(&self.schema);
        let mut value = &mut self.root;
        let mut here = ObjectPath::default();
        for segment in place.segments() {
            // By the value too: some places take a scalar or an object, of which the short form
            // has no keys.
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
                    // The schema has the key, so it is there in some sense; a name of the file's
                    // own may be a mistake in writing.
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

    /// Makes room for an item of a list without names.
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
                let message = format!("a number from 0 to {count} is where it can go");
                return Err(EditError::new(place, message));
            }
        }
        // Another client may insert an item first, and the number would mean another one.
        self.by_number = true;
        Ok(())
    }

    /// A mistake with its path.
    pub(super) fn placed(&self, error: ConfigError) -> EditError {
        let mut place = ObjectPath::default();
        let mut value = Some(&self.root);
        let mut rest = error.path.as_str();
        while !rest.is_empty() {
            let (segment, inner, after) = match value {
                Some(Value::Array(items)) if rest.starts_with('[') => {
                    let (number, after) = rest[1..].split_once(']').unwrap_or((&rest[1..], ""));
                    let n = number.parse().unwrap_or(usize::MAX);
                    // The parser counts items; people see them by their names.
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
    /// The kind of its value: an object, a list, a scalar.
    #[must_use]
    pub fn kind(self) -> Kind<'a> {
        self.shape.kind_of(self.value)
    }

    /// Finds what stands at a key of an object or at a name of a mapping.
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

    /// The objects beneath, by their names: those that are there in their order, and those lists
    /// and objects whose keys have defaults.
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
            // What is set comes first, in the order of the file; then objects that exist by
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

    /// Returns true if it is there even if nothing is set.
    fn is_implied(self) -> bool {
        self.shape.is_structured() && !self.shape.is_optional()
    }

    /// The keys of an object that are not set, and what they are.
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

/// An object without a key, which every place takes until its keys are there.
fn empty() -> Value {
    Value::Object(Map::new())
}

/// An item of a list by its name or number, and its name.
fn item<'a>(list: Found<'a>, segment: &str) -> Option<(String, Found<'a>)> {
    let Kind::List(shape) = list.shape.kind() else {
        return None;
    };
    let items = items(list.value);
    let (n, _) = find(items, segment)?;
    let value = Some(&items[n]);
    Some((names(items).swap_remove(n), Found { value, shape }))
}

/// A value as it is written on a command line.
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
            number.map_err(|_| "a whole number that is not negative")
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
        Kind::Map(_) => Err(EditError::new(place, "this holds objects, which have keys")),
        // A word that stands for an object, or for a list: what it means is checked as a whole.
        Kind::Object(_) | Kind::List(_) => Ok(in_full(text.into(), shape)),
    }
}

/// Objects in the place of scalars that stand for them.
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

/// The key that a path of an error begins with, what stands there, and the path from there.
fn key_of<'t, 'p>(
    entries: &'t Map<String, Value>,
    path: &'p str,
) -> (String, Option<&'t Value>, &'p str) {
    let ends = |rest: &str| rest.is_empty() || rest.starts_with(['.', '[']);
    let leads = |key: &str| path.strip_prefix(key).filter(|rest| ends(rest));
    let keys = entries.iter().filter(|(key, _)| leads(key).is_some());
    // A name may have a dot in it.
    match keys.max_by_key(|(key, _)| key.len()) {
        Some((key, value)) => (key.clone(), Some(value), leads(key).unwrap_or_default()),
        None => (path.to_owned(), None, ""),
    }
}

/// The mistake of a path that does not lead anywhere.
fn lost(here: &ObjectPath, value: Option<&Value>, shape: Shape<'_>, segment: &str) -> EditError {
    match shape.kind_of(value) {
        Kind::Object(keys) => {
            let keys: Vec<&str> = keys.keys().map(String::as_str).collect();
            let hint = match nearest(segment, keys.iter().copied()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("the keys here are {}", keys.join(", ")),
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
            format!("this is a value; there is no `{segment}` beneath it"),
        ),
    }
}

/// Names that a message lists at most.
const MAX_LISTED: usize = 16;

/// The message where an object is used by others.
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
            Some(format!("there is {}", names.join(", ")))
        }
    };
    let message = format!("there is no `{}`", escaped(segment));
    EditError::new(here, message).hint(hint)
}
