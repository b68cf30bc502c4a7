//! Derive macros of Kiln.

use proc_macro::TokenStream;
use quote::{format_ident, quote};
use syn::{Data, DeriveInput, Fields, Index, parse_macro_input, parse_quote};

/// Implements `kiln::StepInput` for a struct or enum whose fields implement it.
///
/// Tensors among the fields become arguments of the compiled step; numbers, lengths and the variant become
/// part of its identity.
#[proc_macro_derive(StepInput)]
pub fn derive_step_input(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand(input)
        .unwrap_or_else(syn::Error::into_compile_error)
        .into()
}

fn expand(input: DeriveInput) -> syn::Result<proc_macro2::TokenStream> {
    let name = &input.ident;
    let (visit, map) = match &input.data {
        Data::Struct(data) => {
            let (pattern, visits, builds) = fields(&data.fields);
            (
                quote!(match self { Self #pattern => { #visits } }),
                quote!(match self { Self #pattern => Self #builds }),
            )
        }
        Data::Enum(data) => {
            let arms = data.variants.iter().enumerate().map(|(index, variant)| {
                let ident = &variant.ident;
                let (pattern, visits, builds) = fields(&variant.fields);
                let index = index as u64;
                let visit = quote!(Self::#ident #pattern => { visitor.structure(#index); #visits });
                (visit, quote!(Self::#ident #pattern => Self::#ident #builds))
            });
            let (visits, maps): (Vec<_>, Vec<_>) = arms.unzip();
            (
                quote!(match self { #(#visits)* }),
                quote!(match self { #(#maps),* }),
            )
        }
        Data::Union(_) => {
            return Err(syn::Error::new_spanned(
                name,
                "StepInput cannot be derived for unions",
            ));
        }
    };

    // The fields' own types carry the bounds: `Tensor<B, 2>: StepInput` implies the bounds on `B`.
    let mut generics = input.generics.clone();
    let types: Vec<_> = field_types(&input.data);
    let clause = generics.make_where_clause();
    for ty in types {
        clause.predicates.push(parse_quote!(#ty: ::kiln::StepInput));
    }
    let (implementation, _, clause) = generics.split_for_impl();
    let (_, arguments, _) = input.generics.split_for_impl();
    Ok(quote! {
        impl #implementation ::kiln::StepInput for #name #arguments #clause {
            fn visit(&self, visitor: &mut ::kiln::InputVisitor) {
                #visit
            }

            fn map(self, map: &mut dyn ::kiln::TensorMap) -> Self {
                #map
            }
        }
    })
}

fn field_types(data: &Data) -> Vec<syn::Type> {
    match data {
        Data::Struct(data) => data.fields.iter().map(|field| field.ty.clone()).collect(),
        Data::Enum(data) => data
            .variants
            .iter()
            .flat_map(|variant| variant.fields.iter().map(|field| field.ty.clone()))
            .collect(),
        Data::Union(_) => Vec::new(),
    }
}

/// The pattern that binds the fields, the visits of the bindings, and the expression that builds the value
/// from mapped bindings.
fn fields(
    fields: &Fields,
) -> (
    proc_macro2::TokenStream,
    proc_macro2::TokenStream,
    proc_macro2::TokenStream,
) {
    let bindings: Vec<_> = (0..fields.len())
        .map(|index| format_ident!("field_{index}"))
        .collect();
    let members: Vec<_> = fields
        .iter()
        .enumerate()
        .map(|(index, field)| match &field.ident {
            Some(ident) => quote!(#ident),
            None => {
                let index = Index::from(index);
                quote!(#index)
            }
        })
        .collect();
    let pattern = quote!({ #(#members: #bindings),* });
    let visits = quote!(#(::kiln::StepInput::visit(#bindings, visitor);)*);
    let builds = quote!({ #(#members: ::kiln::StepInput::map(#bindings, map)),* });
    (pattern, visits, builds)
}
