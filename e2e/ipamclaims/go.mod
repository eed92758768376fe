module cadastre.dev/e2e/ipamclaims

go 1.26.0

require github.com/k8snetworkplumbingwg/ipamclaims v0.5.1-alpha
