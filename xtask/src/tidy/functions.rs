//! Finds the functions in a file based on its syntax.

use std::ops::RangeInclusive;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// A function with a body.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Function {
    /// Function name, including the name of its type if any.
    pub(crate) name: String,
    /// Lines from the signature to the closing brace.
    pub(crate) lines: RangeInclusive<usize>,
}

impl Function {
    pub(crate) fn len(&self) -> usize {
        self.lines.end() - self.lines.start() + 1
    }
}

/// Returns all functions in a file, including nested functions.
pub(crate) fn functions(syntax: &syn::File) -> Vec<Function> {
    let mut found = Found::default();
    found.visit_file(syntax);
    found.functions
}

#[derive(Default)]
struct Found {
    functions: Vec<Function>,
    /// Type or trait that contains the current function.
    owner: Option<String>,
}

impl Found {
    fn add_function(
        &mut self,
        visibility: &syn::Visibility,
        signature: &syn::Signature,
        body: &syn::Block,
    ) {
        // Don't include attributes and documentation, which belong to the item.
        let start = match visibility {
            syn::Visibility::Inherited => signature.span(),
            visibility => visibility.span(),
        };
        let name = signature.ident.to_string();
        self.functions.push(Function {
            name: match &self.owner {
                Some(owner) => format!("{owner}::{name}"),
                None => name,
            },
            lines: start.start().line..=body.brace_token.span.close().end().line,
        });
    }

    fn within(&mut self, owner: Option<String>, visit: impl FnOnce(&mut Self)) {
        let before = std::mem::replace(&mut self.owner, owner);
        visit(self);
        self.owner = before;
    }
}

impl<'ast> Visit<'ast> for Found {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.add_function(&item.vis, &item.sig, &item.block);
        self.within(None, |found| visit::visit_item_fn(found, item));
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.add_function(&item.vis, &item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(body) = &item.default {
            self.add_function(&syn::Visibility::Inherited, &item.sig, body);
        }
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let owner = match &*item.self_ty {
            syn::Type::Path(path) => path.path.segments.last().map(|s| s.ident.to_string()),
            _ => None,
        };
        self.within(owner, |found| visit::visit_item_impl(found, item));
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        let owner = Some(item.ident.to_string());
        self.within(owner, |found| visit::visit_item_trait(found, item));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn function_length_excludes_attributes() {
        let source = "/// A doc.\n#[inline]\npub fn f(a: u8,\n    b: u8) {\n}\n\
                      impl T<u8> {\n    const fn g(&self) { fn h() {} }\n}\ntrait U { fn i(); fn j() {} }\n";
        let found = functions(&syn::parse_file(source).unwrap());
        let shown: Vec<_> = found.iter().map(|f| (&*f.name, f.lines.clone())).collect();
        assert_eq!(
            shown,
            [
                ("f", 3..=5),
                ("T::g", 7..=7),
                ("T::h", 7..=7),
                ("U::j", 9..=9)
            ]
        );
        assert_eq!(found[0].len(), 3);
    }
}
