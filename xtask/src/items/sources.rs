//! Access to the content of source files, to verify that a function or type is present.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use walkdir::WalkDir;

use crate::root;

/// Source files. To avoid reading a file again, its content is kept in a map.
pub(super) struct Sources {
    root: PathBuf,
    texts: RefCell<BTreeMap<PathBuf, Rc<String>>>,
}

impl Sources {
    pub(super) fn new() -> Self {
        Self::at(root())
    }

    pub(super) fn at(root: PathBuf) -> Self {
        Self {
            root,
            texts: RefCell::default(),
        }
    }

    /// Returns true if this is a path, which must start with a directory that is present in the
    /// root directory.
    pub(super) fn is_path(&self, text: &str) -> bool {
        let first = text.split_once('/').map(|(first, _)| first);
        let is_name = |first: &str| !first.is_empty() && !first.contains([' ', '.']);
        first.is_some_and(|first| is_name(first) && self.root.join(first).is_dir())
    }

    pub(super) fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    /// Returns true if there is a function or method with this name in a Rust file, or in any file
    /// below a directory.
    pub(super) fn has_function(&self, path: &str, name: &str) -> bool {
        let heads = ["(", "<"].map(|end| format!("fn {name}{end}"));
        self.any(path, |text| {
            heads.iter().any(|head| text.contains(head.as_str()))
        })
    }

    /// Same as [`Self::has_function`], but for any word, such as a type.
    pub(super) fn has_word(&self, path: &str, word: &str) -> bool {
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        self.any(path, |text| {
            text.match_indices(word).any(|(at, _)| {
                let before = text[..at].chars().next_back();
                let after = text[at + word.len()..].chars().next();
                !before.is_some_and(is_part) && !after.is_some_and(is_part)
            })
        })
    }

    /// Returns the root directory of the package for the specified file.
    pub(super) fn package(&self, path: &str) -> Option<String> {
        let parents = Path::new(path).ancestors().skip(1);
        let mut packages = parents.filter(|parent| {
            *parent != Path::new("") && self.root.join(parent).join("Cargo.toml").exists()
        });
        packages.next().map(|path| path.display().to_string())
    }

    fn any(&self, path: &str, is_it: impl Fn(&str) -> bool) -> bool {
        let files = WalkDir::new(self.root.join(path)).into_iter();
        files
            .filter_map(Result::ok)
            .filter(|file| file.path().extension().is_some_and(|e| e == "rs"))
            .any(|file| is_it(&self.text(file.path())))
    }

    fn text(&self, path: &Path) -> Rc<String> {
        let mut texts = self.texts.borrow_mut();
        let read = || Rc::new(fs::read_to_string(path).unwrap_or_default());
        Rc::clone(texts.entry(path.to_owned()).or_insert_with(read))
    }
}
