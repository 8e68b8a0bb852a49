"""The countries of the world: name, capital, continent, and the names people also use.

Data only. Where a capital is disputed or shared, the seat most atlases print stands here.
"""

from __future__ import annotations

from dataclasses import dataclass

TABLE = """
Afghanistan|Kabul|Asia;Albania|Tirana|Europe;Algeria|Algiers|Africa;Andorra|Andorra la Vella|Europe
Angola|Luanda|Africa;Antigua and Barbuda|Saint John's|North America;Argentina|Buenos Aires|South America
Armenia|Yerevan|Asia;Australia|Canberra|Oceania;Austria|Vienna|Europe;Azerbaijan|Baku|Asia
the Bahamas|Nassau|North America;Bahrain|Manama|Asia;Bangladesh|Dhaka|Asia;Barbados|Bridgetown|North America
Belarus|Minsk|Europe;Belgium|Brussels|Europe;Belize|Belmopan|North America;Benin|Porto-Novo|Africa
Bhutan|Thimphu|Asia;Bolivia|Sucre|South America;Bosnia and Herzegovina|Sarajevo|Europe;Botswana|Gaborone|Africa
Brazil|Brasilia|South America;Brunei|Bandar Seri Begawan|Asia;Bulgaria|Sofia|Europe
Burkina Faso|Ouagadougou|Africa;Burundi|Gitega|Africa;Cambodia|Phnom Penh|Asia;Cameroon|Yaounde|Africa
Canada|Ottawa|North America;Cape Verde|Praia|Africa;the Central African Republic|Bangui|Africa
Chad|N'Djamena|Africa;Chile|Santiago|South America;China|Beijing|Asia;Colombia|Bogota|South America
the Comoros|Moroni|Africa;Costa Rica|San Jose|North America;Croatia|Zagreb|Europe;Cuba|Havana|North America
Cyprus|Nicosia|Europe;Czechia|Prague|Europe;the Democratic Republic of the Congo|Kinshasa|Africa
Denmark|Copenhagen|Europe;Djibouti|Djibouti City|Africa;Dominica|Roseau|North America
the Dominican Republic|Santo Domingo|North America;East Timor|Dili|Asia;Ecuador|Quito|South America
Egypt|Cairo|Africa;El Salvador|San Salvador|North America;Equatorial Guinea|Malabo|Africa;Eritrea|Asmara|Africa
Estonia|Tallinn|Europe;Eswatini|Mbabane|Africa;Ethiopia|Addis Ababa|Africa;Fiji|Suva|Oceania
Finland|Helsinki|Europe;France|Paris|Europe;Gabon|Libreville|Africa;the Gambia|Banjul|Africa
Georgia|Tbilisi|Asia;Germany|Berlin|Europe;Ghana|Accra|Africa;Greece|Athens|Europe
Grenada|Saint George's|North America;Guatemala|Guatemala City|North America;Guinea|Conakry|Africa
Guinea-Bissau|Bissau|Africa;Guyana|Georgetown|South America;Haiti|Port-au-Prince|North America
Honduras|Tegucigalpa|North America;Hungary|Budapest|Europe;Iceland|Reykjavik|Europe;India|New Delhi|Asia
Indonesia|Jakarta|Asia;Iran|Tehran|Asia;Iraq|Baghdad|Asia;Ireland|Dublin|Europe;Israel|Jerusalem|Asia
Italy|Rome|Europe;Ivory Coast|Yamoussoukro|Africa;Jamaica|Kingston|North America;Japan|Tokyo|Asia
Jordan|Amman|Asia;Kazakhstan|Astana|Asia;Kenya|Nairobi|Africa;Kiribati|Tarawa|Oceania;Kosovo|Pristina|Europe
Kuwait|Kuwait City|Asia;Kyrgyzstan|Bishkek|Asia;Laos|Vientiane|Asia;Latvia|Riga|Europe;Lebanon|Beirut|Asia
Lesotho|Maseru|Africa;Liberia|Monrovia|Africa;Libya|Tripoli|Africa;Liechtenstein|Vaduz|Europe
Lithuania|Vilnius|Europe;Luxembourg|Luxembourg City|Europe;Madagascar|Antananarivo|Africa;Malawi|Lilongwe|Africa
Malaysia|Kuala Lumpur|Asia;the Maldives|Male|Asia;Mali|Bamako|Africa;Malta|Valletta|Europe
the Marshall Islands|Majuro|Oceania;Mauritania|Nouakchott|Africa;Mauritius|Port Louis|Africa
Mexico|Mexico City|North America;Micronesia|Palikir|Oceania;Moldova|Chisinau|Europe;Monaco|Monaco City|Europe
Mongolia|Ulaanbaatar|Asia;Montenegro|Podgorica|Europe;Morocco|Rabat|Africa;Mozambique|Maputo|Africa
Myanmar|Naypyidaw|Asia;Namibia|Windhoek|Africa;Nauru|Yaren|Oceania;Nepal|Kathmandu|Asia
the Netherlands|Amsterdam|Europe;New Zealand|Wellington|Oceania;Nicaragua|Managua|North America
Niger|Niamey|Africa;Nigeria|Abuja|Africa;North Korea|Pyongyang|Asia;North Macedonia|Skopje|Europe
Norway|Oslo|Europe;Oman|Muscat|Asia;Pakistan|Islamabad|Asia;Palau|Ngerulmud|Oceania;Palestine|Ramallah|Asia
Panama|Panama City|North America;Papua New Guinea|Port Moresby|Oceania;Paraguay|Asuncion|South America
Peru|Lima|South America;the Philippines|Manila|Asia;Poland|Warsaw|Europe;Portugal|Lisbon|Europe;Qatar|Doha|Asia
the Republic of the Congo|Brazzaville|Africa;Romania|Bucharest|Europe;Russia|Moscow|Europe;Rwanda|Kigali|Africa
Saint Kitts and Nevis|Basseterre|North America;Saint Lucia|Castries|North America
Saint Vincent and the Grenadines|Kingstown|North America;Samoa|Apia|Oceania;San Marino|San Marino City|Europe
Sao Tome and Principe|Sao Tome|Africa;Saudi Arabia|Riyadh|Asia;Senegal|Dakar|Africa;Serbia|Belgrade|Europe
the Seychelles|Victoria|Africa;Sierra Leone|Freetown|Africa;Singapore|Singapore City|Asia
Slovakia|Bratislava|Europe;Slovenia|Ljubljana|Europe;the Solomon Islands|Honiara|Oceania
Somalia|Mogadishu|Africa;South Africa|Pretoria|Africa;South Korea|Seoul|Asia;South Sudan|Juba|Africa
Spain|Madrid|Europe;Sri Lanka|Sri Jayawardenepura Kotte|Asia;Sudan|Khartoum|Africa
Suriname|Paramaribo|South America;Sweden|Stockholm|Europe;Switzerland|Bern|Europe;Syria|Damascus|Asia
Taiwan|Taipei|Asia;Tajikistan|Dushanbe|Asia;Tanzania|Dodoma|Africa;Thailand|Bangkok|Asia;Togo|Lome|Africa
Tonga|Nuku'alofa|Oceania;Trinidad and Tobago|Port of Spain|North America;Tunisia|Tunis|Africa
Turkey|Ankara|Asia;Turkmenistan|Ashgabat|Asia;Tuvalu|Funafuti|Oceania;Uganda|Kampala|Africa;Ukraine|Kyiv|Europe
the United Arab Emirates|Abu Dhabi|Asia;the United Kingdom|London|Europe
the United States|Washington, D.C.|North America;Uruguay|Montevideo|South America;Uzbekistan|Tashkent|Asia
Vanuatu|Port Vila|Oceania;Vatican City|Vatican City|Europe;Venezuela|Caracas|South America;Vietnam|Hanoi|Asia
Yemen|Sanaa|Asia;Zambia|Lusaka|Africa;Zimbabwe|Harare|Africa
"""

ALIASES = {
    "the United States": ("the USA", "the US", "America", "USA", "the United States of America"),
    "the United Kingdom": ("the UK", "Britain", "UK", "Great Britain"),
    "the Netherlands": ("Netherlands", "Holland"),
    "Czechia": ("the Czech Republic",),
    "Ivory Coast": ("Cote d'Ivoire",),
    "Myanmar": ("Burma",),
    "Turkey": ("Türkiye",),
    "Eswatini": ("Swaziland",),
    "East Timor": ("Timor-Leste",),
    "Cape Verde": ("Cabo Verde",),
    "the United Arab Emirates": ("the UAE", "UAE"),
    "the Democratic Republic of the Congo": ("DR Congo", "the DRC"),
    "the Republic of the Congo": ("Congo-Brazzaville",),
    "the Philippines": ("Philippines",),
    "the Bahamas": ("Bahamas",),
    "the Maldives": ("Maldives",),
    "the Gambia": ("Gambia",),
}


@dataclass(frozen=True)
class Country:
    """One country, its capital and its continent; the name carries its article."""

    name: str
    capital: str
    continent: str

    @property
    def title(self) -> str:
        """The name as a sentence begins with it."""
        return self.name[:1].upper() + self.name[1:]


COUNTRIES = tuple(
    Country(*(field.strip() for field in entry.split("|")))
    for line in TABLE.strip().splitlines()
    for entry in line.split(";")
)
CONTINENTS = ("Africa", "Asia", "Europe", "North America", "South America", "Oceania", "Antarctica")
# Asked for more often, so that a small model is surest where people will try it first.
FAMILIAR = tuple(
    country
    for country in COUNTRIES
    if country.name
    in {
        "France", "Germany", "Italy", "Spain", "Japan", "China", "India", "Brazil", "Canada", "Australia",
        "the United States", "the United Kingdom", "Russia", "Mexico", "Egypt", "Kenya", "Norway", "Sweden",
        "Poland", "Greece", "Portugal", "Turkey", "Argentina", "South Korea", "Thailand", "Austria", "Ireland",
        "Switzerland", "Peru", "Chile", "the Netherlands", "Belgium", "Denmark", "Finland", "Hungary", "Czechia",
    }
)  # fmt: skip
