//! The Rust sources of a tree of folders: packages, the files of each, and the purpose of each
//! line.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};

use proc_macro2::extra::invalidate_current_thread_spans;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use walkdir::WalkDir;

use super::lexical::Text;
use crate::Failure;

/// Purpose of a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    Product,
    Test,
    Generated,
}

/// Folders whose sources are for tests, wherever they are in a tree.
const TEST_FOLDERS: &[&str] = &[
    "tests", "test", "testing", "testkit", "benches", "examples", "fuzz",
];

/// A package, or a folder of sources without a manifest.
pub(crate) struct Package {
    /// Its folder below the tree's root; the tree's own name for the root itself.
    pub(crate) name: String,
    pub(crate) manifest: toml::Table,
    pub(crate) sources: Vec<Source>,
    /// Files that cannot be read as Rust, each with the reason.
    pub(crate) unreadable: Vec<String>,
}

/// A source file of a package, taken apart and parsed.
pub(crate) struct Source {
    /// Relative to the tree's root.
    pub(crate) path: PathBuf,
    /// The module that it is, if a crate of its package has it.
    pub(crate) module: Option<Module>,
    pub(crate) text: Text,
    pub(crate) syntax: syn::File,
    purpose: Purpose,
    /// Lines of test code in a file of the product.
    tests: Vec<RangeInclusive<usize>>,
}

/// A module of a crate.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Module {
    /// The crate's root file, relative to the tree's root.
    pub(crate) root: PathBuf,
    /// Names of modules from the root down.
    pub(crate) path: Vec<String>,
}

impl Source {
    /// The purpose of a line, by its number from 1.
    pub(crate) fn purpose_of(&self, line: usize) -> Purpose {
        if self.tests.iter().any(|range| range.contains(&line)) {
            return Purpose::Test;
        }
        self.purpose
    }

    /// The purpose of the file, apart from tests within it.
    pub(crate) fn purpose(&self) -> Purpose {
        self.purpose
    }
}

/// Reads all sources below a folder. Files that are not Rust, as the templates of some projects,
/// are named beside the others.
pub(crate) fn read(root: &Path) -> Result<Vec<Package>, Failure> {
    // Positions of earlier trees would only take memory.
    invalidate_current_thread_spans();
    let (mut manifests, mut files) = (BTreeMap::new(), Vec::new());
    for path in paths(root)? {
        if path.file_name().is_some_and(|name| name == "Cargo.toml") {
            let manifest: toml::Table = fs::read_to_string(root.join(&path))?
                .parse()
                .map_err(|e| format!("{}: {e}", path.display()))?;
            if manifest.contains_key("package") {
                manifests.insert(path.parent().unwrap_or(&path).to_owned(), manifest);
            }
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    let mut owned = BTreeMap::<PathBuf, Vec<PathBuf>>::new();
    for file in files {
        // The nearest manifest above: packages lie within each other's folders here.
        let owner = file.ancestors().find(|a| manifests.contains_key(*a));
        let owner = owner.unwrap_or(Path::new("")).to_owned();
        owned.entry(owner).or_default().push(file);
    }
    let own_name = fs::canonicalize(root)?;
    let own_name = own_name.file_name().unwrap_or_default().to_string_lossy();
    let mut packages = Vec::new();
    for (folder, files) in owned {
        let name = match folder.to_string_lossy() {
            name if name.is_empty() => own_name.to_string(),
            name => name.to_string(),
        };
        let manifest = manifests.remove(&folder).unwrap_or_default();
        let reader = Reader::new(root, &folder, &manifest, &files);
        let (sources, unreadable) = reader.read(files.clone());
        packages.push(Package {
            name,
            manifest,
            sources,
            unreadable,
        });
    }
    Ok(packages)
}

/// Files of a tree, relative to its root, without what is hidden and what Cargo has built.
pub(crate) fn paths(root: &Path) -> Result<Vec<PathBuf>, Failure> {
    let is_wanted = |entry: &walkdir::DirEntry| {
        let is_hidden = entry.file_name().to_string_lossy().starts_with('.');
        let is_output = entry.path().join("CACHEDIR.TAG").exists();
        entry.depth() == 0 || !(is_hidden || is_output)
    };
    let mut paths = Vec::new();
    for entry in WalkDir::new(root)
        .sort_by_file_name()
        .into_iter()
        .filter_entry(is_wanted)
    {
        let entry = entry?;
        if entry.file_type().is_file() {
            paths.push(entry.path().strip_prefix(root)?.to_owned());
        }
    }
    Ok(paths)
}

/// Reads the files of one package: those of its crates along `mod` items, the others as they are.
struct Reader<'a> {
    root: &'a Path,
    own: BTreeSet<&'a Path>,
    /// Root files of the crates, at which reading begins.
    crates: Vec<PathBuf>,
    is_for_tests: bool,
    done: BTreeMap<PathBuf, Source>,
    unreadable: BTreeMap<PathBuf, String>,
}

impl<'a> Reader<'a> {
    fn new(root: &'a Path, folder: &Path, manifest: &toml::Table, files: &'a [PathBuf]) -> Self {
        let own: BTreeSet<_> = files.iter().map(PathBuf::as_path).collect();
        let stated = ["lib", "bin"].iter().filter_map(|key| manifest.get(*key));
        let stated = stated.flat_map(|value| match value {
            toml::Value::Array(values) => values.as_slice(),
            value => std::slice::from_ref(value),
        });
        let stated = stated.filter_map(|table| table.get("path")?.as_str());
        let mut crates: Vec<_> = stated
            .chain(["src/lib.rs", "src/main.rs", "build.rs", "lib.rs", "main.rs"])
            .map(|path| folder.join(path))
            .collect();
        let programs = folder.join("src/bin");
        crates.extend(files.iter().filter_map(|file| {
            let below = file.strip_prefix(&programs).ok()?;
            let is_root = below.components().count() == 1 || below.ends_with("main.rs");
            is_root.then(|| file.clone())
        }));
        crates.retain(|path| own.contains(path.as_path()));
        Self {
            root,
            own,
            crates,
            is_for_tests: is_in_test_folder(folder),
            done: BTreeMap::new(),
            unreadable: BTreeMap::new(),
        }
    }

    /// Reads the sources; returns also the messages about those that it cannot read.
    fn read(mut self, files: Vec<PathBuf>) -> (Vec<Source>, Vec<String>) {
        for root in std::mem::take(&mut self.crates) {
            let module = Module {
                root: root.clone(),
                path: Vec::new(),
            };
            self.follow(&root, module, self.is_for_tests, true);
        }
        // What no `mod` item names: tests, benchmarks, and modules that only a macro declares.
        for path in files {
            if !self.done.contains_key(&path) {
                let is_test = self.is_for_tests || is_in_test_folder(&path);
                self.take(&path, None, is_test);
            }
        }
        let message = |(path, why): (PathBuf, String)| format!("{}: {why}", path.display());
        let unreadable = self.unreadable.into_iter().map(message).collect();
        (self.done.into_values().collect(), unreadable)
    }

    /// Reads a module's file and those of the modules in it.
    fn follow(&mut self, path: &Path, module: Module, is_test: bool, is_root: bool) {
        // A file belongs to the module that reaches it first. A second crate of the package may
        // name it again.
        if self.done.contains_key(path) {
            return;
        }
        let Some(declared) = self.take(path, Some(module.clone()), is_test) else {
            return;
        };
        let folder = path.parent().unwrap_or(Path::new(""));
        let stem = path.file_stem().unwrap_or_default();
        // As rustc looks for it: children of `mod.rs` and of a root lie beside it, those of
        // another file in a folder of its name.
        let inner = if is_root || stem == "mod" {
            folder.to_owned()
        } else {
            folder.join(stem)
        };
        for Declared {
            names,
            file,
            is_test: is_test_here,
        } in declared
        {
            let (name, nesting) = names.split_last().expect("a module has a name");
            let below = nesting.iter().fold(inner.clone(), |at, n| at.join(n));
            let candidates = match &file {
                // A `path` attribute counts from the folder of the file, or, within an inline
                // module, from the folder of that.
                Some(file) if nesting.is_empty() => vec![normal(&folder.join(file))],
                Some(file) => vec![normal(&below.join(file))],
                None => vec![
                    below.join(format!("{name}.rs")),
                    below.join(name).join("mod.rs"),
                ],
            };
            let mut module = module.clone();
            module.path.extend(names);
            if let Some(file) = candidates.iter().find(|c| self.own.contains(c.as_path())) {
                self.follow(file, module, is_test || is_test_here, false);
            }
        }
    }

    /// Reads one file; returns the modules that it declares.
    fn take(
        &mut self,
        path: &Path,
        module: Option<Module>,
        is_test: bool,
    ) -> Option<Vec<Declared>> {
        let (source, text, syntax) = match parsed(&self.root.join(path)) {
            Ok(parsed) => parsed,
            Err(e) => {
                self.unreadable.insert(path.to_owned(), e.to_string());
                return None;
            }
        };
        // By the syntax and not by words: `#[cfg(test)]` may stand before a module, a function or
        // a single import.
        let mut items = Items::default();
        items.visit_file(&syntax);
        let purpose = match (is_generated(path, &source), is_test) {
            (true, _) => Purpose::Generated,
            (false, true) => Purpose::Test,
            (false, false) => Purpose::Product,
        };
        let source = Source {
            path: path.to_owned(),
            module,
            text,
            syntax,
            purpose,
            tests: items.tests,
        };
        self.done.insert(path.to_owned(), source);
        Some(items.declared)
    }
}

/// A file's text, its words and its syntax tree.
fn parsed(path: &Path) -> Result<(String, Text, syn::File), Failure> {
    let source = fs::read_to_string(path)?;
    let plain = source.trim_start_matches('\u{feff}');
    let (text, tokens) = Text::new(plain)?;
    let syntax = syn::parse2(tokens)?;
    Ok((source, text, syntax))
}

/// A module that an item declares to be in another file.
struct Declared {
    /// The names of the modules in this file around the item, and its own.
    names: Vec<String>,
    /// The file that a `path` attribute names.
    file: Option<String>,
    is_test: bool,
}

/// Purposes and other files, as the items of a file name them.
#[derive(Default)]
struct Items {
    tests: Vec<RangeInclusive<usize>>,
    declared: Vec<Declared>,
    /// The modules around the current item.
    names: Vec<String>,
    is_in_test: bool,
}

impl Items {
    /// Visits an item, whose lines are test code if its attributes say so.
    fn enter(
        &mut self,
        attributes: &[syn::Attribute],
        lines: RangeInclusive<usize>,
        visit: impl FnOnce(&mut Self),
    ) {
        let before = self.is_in_test;
        if !before && attributes.iter().any(is_for_tests) {
            self.is_in_test = true;
            self.tests.push(lines);
        }
        visit(self);
        self.is_in_test = before;
    }
}

impl<'ast> Visit<'ast> for Items {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        self.enter(attributes(item), lines(item), |items| {
            visit::visit_item(items, item);
        });
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.enter(&item.attrs, lines(item), |items| {
            visit::visit_impl_item_fn(items, item);
        });
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.names.push(item.ident.to_string());
        if item.content.is_none() {
            let file = item.attrs.iter().find_map(named_file);
            self.declared.push(Declared {
                names: self.names.clone(),
                file,
                is_test: self.is_in_test,
            });
        }
        visit::visit_item_mod(self, item);
        self.names.pop();
    }
}

/// The file that a `path` attribute names.
fn named_file(attribute: &syn::Attribute) -> Option<String> {
    let value = &attribute.meta.require_name_value().ok()?.value;
    match value {
        syn::Expr::Lit(syn::ExprLit {
            lit: syn::Lit::Str(file),
            ..
        }) if attribute.path().is_ident("path") => Some(file.value()),
        _ => None,
    }
}

/// The lines of a node, its attributes and docs included.
pub(crate) fn lines(node: &impl Spanned) -> RangeInclusive<usize> {
    let span = node.span();
    span.start().line..=span.end().line
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    use syn::Item;
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Recognizes `#[test]` in its variants and `#[cfg(test)]`. A condition with `not` may hold in the
/// product.
fn is_for_tests(attribute: &syn::Attribute) -> bool {
    let path = attribute.path();
    if path
        .segments
        .last()
        .is_some_and(|last| last.ident == "test")
    {
        return true;
    }
    let condition = match &attribute.meta {
        syn::Meta::List(list) if path.is_ident("cfg") => list.tokens.to_string(),
        _ => return false,
    };
    let has = |name| {
        let mut words = condition.split(|c: char| !(c.is_alphanumeric() || c == '_'));
        words.any(|word| word == name)
    };
    has("test") && !has("not")
}

fn is_in_test_folder(path: &Path) -> bool {
    let parts = path.components().map(Component::as_os_str);
    let mut parts = parts.filter_map(|part| part.to_str());
    parts.any(|part| TEST_FOLDERS.contains(&part))
}

fn is_generated(path: &Path, source: &str) -> bool {
    let head = source.lines().take(3).collect::<String>().to_lowercase();
    let is_in_folder = path.components().any(|c| c.as_os_str() == "generated");
    is_in_folder
        || ["generated by", "@generated"]
            .iter()
            .any(|mark| head.contains(mark))
}

/// A path without `..` in it.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::sh::Scratch;

    /// Reads a tree of these files.
    pub(crate) fn tree(name: &str, files: &[(&str, &str)]) -> Vec<Package> {
        let scratch = Scratch::new(name).unwrap();
        for (path, text) in files {
            let path = scratch.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        read(scratch.path()).unwrap()
    }

    #[test]
    fn files_that_are_not_rust_are_named() {
        let packages = tree(
            "tidy-unreadable",
            &[("src/lib.rs", "mod one;\n"), ("src/one.rs", "fn {{name}}")],
        );
        let [package] = &packages[..] else {
            panic!("{} packages", packages.len());
        };
        assert_eq!(package.sources.len(), 1);
        let [message] = &package.unreadable[..] else {
            panic!("{:?}", package.unreadable);
        };
        assert!(message.starts_with("src/one.rs: "), "{message}");
    }

    #[test]
    fn files_are_read_along_their_modules() {
        let manifest = "[package]\nname = \"a\"\n";
        let packages = tree(
            "tidy-sources",
            &[
                ("Cargo.toml", manifest),
                (
                    "src/lib.rs",
                    "mod one;\n#[cfg(test)]\nmod checks;\n#[path = \"odd.rs\"]\nmod two;\n",
                ),
                ("src/one/mod.rs", "mod inner;\nmod inline { mod deep; }\n"),
                (
                    "src/one/inner.rs",
                    "fn f() {}\n#[cfg(test)]\nmod tests {\n    #[test]\n    fn g() {}\n}\n",
                ),
                ("src/one/inline/deep.rs", "// @generated\n"),
                ("src/odd.rs", ""),
                ("src/checks.rs", ""),
                ("tests/a.rs", ""),
                (".build/x.rs", ""),
                ("other/Cargo.toml", manifest),
                ("other/main.rs", "#[cfg(not(test))]\nfn f() {}\n"),
            ],
        );
        let shown = |package: &Package| -> Vec<_> {
            let sources = package.sources.iter();
            let shown = sources.map(|s| {
                let module = s.module.as_ref().map(|module| module.path.join("::"));
                (s.path.to_str().unwrap().to_owned(), module, s.purpose)
            });
            shown.collect()
        };
        use Purpose::{Generated, Product, Test};
        let expected = |path: &str, module: Option<&str>, purpose| {
            (path.to_owned(), module.map(str::to_owned), purpose)
        };
        assert_eq!(
            shown(&packages[0]),
            [
                expected("src/checks.rs", Some("checks"), Test),
                expected("src/lib.rs", Some(""), Product),
                expected("src/odd.rs", Some("two"), Product),
                expected(
                    "src/one/inline/deep.rs",
                    Some("one::inline::deep"),
                    Generated
                ),
                expected("src/one/inner.rs", Some("one::inner"), Product),
                expected("src/one/mod.rs", Some("one"), Product),
                expected("tests/a.rs", None, Test),
            ]
        );
        assert_eq!(packages[1].name, "other");
        assert_eq!(shown(&packages[1])[0].2, Product);
        let inner = &packages[0].sources[4];
        assert_eq!(inner.purpose_of(1), Product);
        assert_eq!(inner.purpose_of(2), Test);
        assert_eq!(inner.purpose_of(6), Test);
        assert_eq!(packages[1].sources[0].purpose_of(2), Product);
    }
}
